"""Rendering against transformers' own, and the rules around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.ingress.model_files import GEMMA_TEMPLATE, ModelFilesError, read_model_files
from services.ingress.template import ChatTemplate, InvalidTemplateError, TemplateRefusedError
from services.ingress.text_model import TextModel
from tests.ingress.models import BOS, END, EOS, START, byte_level, write_folder

CHATML = (
    "{% for message in messages %}\n"
    "  {%- if loop.index0 > 6 %}{% break %}{% endif %}\n"
    "{% generation %}<|im_start|>{{ message.role }}\n{{ message['content'] | trim }}<|im_end|>{% endgeneration %}\n"
    "  {% if loop.first %}  \n  first\n  {% endif %}\n"
    "{% endfor %}{{ {'q': '<é>'} | tojson }}{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

words = st.text(alphabet="ab <>&'\"é\n", max_size=12)
turns = st.lists(words, min_size=1, max_size=6).map(
    lambda said: [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
)
conversations = st.tuples(st.none() | words, turns).map(
    lambda pair: ([] if pair[0] is None else [{"role": "system", "content": pair[0]}]) + pair[1]
)


@pytest.fixture(scope="module")
def transformers_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    transformers = pytest.importorskip("transformers")
    folder = write_folder(tmp_path_factory.mktemp("model"), byte_level())
    return transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(conversations, st.booleans())
def test_renders_and_tokenizes_as_transformers_does(
    transformers_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory, messages: list[dict[str, str]], prompt: bool
) -> None:
    for source in (GEMMA_TEMPLATE.read_text(), CHATML):
        theirs = transformers_tokenizer.apply_chat_template(
            messages, chat_template=source, add_generation_prompt=prompt, tokenize=False
        )
        variables = {"bos_token": "<bos>", "eos_token": "<eos>"}
        assert ChatTemplate(source, variables).render(messages, add_generation_prompt=prompt) == theirs


async def test_chat_ids_are_those_of_transformers(transformers_tokenizer: Any, tmp_path: Path) -> None:
    model = TextModel.load("m", write_folder(tmp_path, byte_level()))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " the <end_of_turn> hall "}]
    assert model.template is not None
    ids = await model.encode(model.template.render(messages, add_generation_prompt=True))
    theirs = transformers_tokenizer.apply_chat_template(
        messages, chat_template=GEMMA_TEMPLATE.read_text(), add_generation_prompt=True, return_dict=False
    )
    assert ids == theirs
    assert ids[:2] == [BOS, START]


def test_a_conversation_the_template_refuses_is_told_in_its_words() -> None:
    template = ChatTemplate(GEMMA_TEMPLATE.read_text(), {"bos_token": "<bos>"})
    with pytest.raises(TemplateRefusedError, match="must alternate"):
        template.render(
            [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], add_generation_prompt=True
        )


@pytest.mark.parametrize("source", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ nothing.x }}"])
def test_templates_are_kept_in_a_sandbox(source: str) -> None:
    with pytest.raises(TemplateRefusedError):
        ChatTemplate(source, {}).render([{"role": "user", "content": "a"}], add_generation_prompt=True)


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(InvalidTemplateError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})


def test_precedence_of_templates(tmp_path: Path) -> None:
    override = tmp_path / "override.jinja"
    override.write_text("override")
    assert read_model_files(write_folder(tmp_path / "a", byte_level())).chat_template == GEMMA_TEMPLATE.read_text()
    assert read_model_files(write_folder(tmp_path / "b", byte_level(), gemma=False)).chat_template is None
    own = write_folder(tmp_path / "c", byte_level(), chat_template="own")
    assert read_model_files(own).chat_template == "own"
    (own / "chat_template.jinja").write_text("own file")
    assert read_model_files(own).chat_template == "own file"
    assert read_model_files(own, override).chat_template == "override"
    with pytest.raises(ModelFilesError, match=r"missing\.jinja"):
        read_model_files(own, tmp_path / "missing.jinja")


async def test_bos_is_never_doubled_and_stop_tokens_are_found(tmp_path: Path) -> None:
    model = TextModel.load("m", write_folder(tmp_path, byte_level()))
    plain = await model.encode_prompt("hall")
    assert plain[0] == BOS
    assert await model.encode_prompt("<bos>hall") == plain
    assert await model.encode_prompt("") == [BOS]
    assert model.stop_ids == (EOS,)
    assert model.chat_stop_ids == (EOS, END)


async def test_bos_by_configuration_alone(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    raw = (folder / "tokenizer.json").read_text()
    import json

    content = json.loads(raw)
    content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert (await TextModel.load("m", folder).encode_prompt("a"))[0] != BOS
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "add_bos_token": True}))
    assert (await TextModel.load("m", folder).encode_prompt("a"))[0] == BOS


async def test_long_texts_are_encoded_as_short_ones_are(tmp_path: Path) -> None:
    model = TextModel.load("m", write_folder(tmp_path, byte_level()))
    piece = "the hall é "
    assert await model.encode(piece * 2_000) == (await model.encode(piece)) * 2_000


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "generation_config.json", "tokenizer_config.json"])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / name).write_text("{")
    with pytest.raises(ModelFilesError, match=name):
        TextModel.load("m", folder)
    (folder / name).write_text("[]")
    with pytest.raises(ModelFilesError, match=name):
        TextModel.load("m", folder)


def test_a_missing_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="does not exist"):
        TextModel.load("m", tmp_path / "nowhere")
