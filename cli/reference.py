"""The exactness oracle: transformers' own forward, in a process that imports none of Segue's code.

    python cli/reference.py MODEL_FOLDER < cases.jsonl > verdicts.jsonl

A case is {"id", "tokens", "generated", "sampling"?, "choice"?, "logprobs"?}: the prompt's ids, the ids that were
delivered, if they were drawn, how, and what was said of their probabilities: [of the token, [[id, of the id], …]] each.
Teacher forcing: one forward over prompt + delivered tokens with a contiguous cache, fp32; each delivered token is then
judged by the logits before it. Greedy: its logit's distance from the largest, and whether it is the argmax. Sampled:
the draw is done again on the reference logits, by an independent implementation of Philox4x32-10 (Salmon et al., 2011)
and of the filters below, and must give the same token.

A verdict is {"id", "tokens", "max_gap", "argmax", "mismatches", "logprob_gap"}: how many tokens were judged, the
largest distance, how many were the argmax, for shaped cases at which indices another token was drawn, with the distance
of the uniform from the drawn token's interval (of its logit from the largest, where nothing is drawn), and the largest
distance of a log-probability that was said; a token that should have been in a list and is not counts too.

The order of operations of a draw: repetition penalty (prompt and output), frequency and presence penalties (output),
logit_bias, the mask, temperature, top_k, top_p, min_p, then the inverse of the cumulative distribution over ascending
token ids, in float64. The mask stands in for a grammar: {"modulus": m} allows the ids that are, modulo m, the output's
length plus the sum of its ids.
"""

import json
import math
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

M0, M1 = 0xD2511F53, 0xCD9E8D57
W0, W1 = 0x9E3779B9, 0xBB67AE85
MASK = 0xFFFFFFFF


def philox_uniform(seed: int, position: int, choice: int) -> float:
    """One uniform in [0, 1): the first two output words as 53 bits."""
    counter = [position & MASK, position >> 32, choice & MASK, choice >> 32]
    key = [seed & MASK, (seed >> 32) & MASK]
    for _ in range(10):
        high0, low0 = divmod(M0 * counter[0], 1 << 32)
        high1, low1 = divmod(M1 * counter[2], 1 << 32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + W0) & MASK, (key[1] + W1) & MASK]
    return (((counter[0] << 32) | counter[1]) >> 11) * 2.0**-53


def shaped(logits: np.ndarray, sampling: dict, prompt: list[int], output: list[int]) -> np.ndarray:
    """Logits (float64) after penalties, bias and mask."""
    x = logits.astype(np.float64)
    repetition = sampling.get("repetition_penalty") or 1.0
    if repetition != 1.0:
        seen = np.unique(np.array(prompt + output))
        x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    if output and (sampling.get("presence_penalty") or sampling.get("frequency_penalty")):
        ids, counts = np.unique(np.array(output), return_counts=True)
        x[ids] -= sampling.get("presence_penalty", 0.0) + sampling.get("frequency_penalty", 0.0) * counts
    for token, bias in sampling.get("logit_bias", {}).items():
        x[int(token)] += bias
    if sampling.get("mask"):
        modulus = sampling["mask"]["modulus"]
        x[np.arange(len(x)) % modulus != (len(output) + sum(output)) % modulus] = -np.inf
    return x


def filtered(x: np.ndarray, sampling: dict) -> np.ndarray:
    """Probabilities (float64, ascending ids) a token is drawn from, of its shaped logits."""
    x = x / sampling["temperature"]
    p = np.exp(x - x.max())
    p /= p.sum()
    keep = np.ones(len(p), dtype=bool)
    top_k, top_p = sampling.get("top_k") or 0, sampling.get("top_p") or 1.0
    if top_k or top_p < 1.0:
        # Most likely first, the lower id among equals.
        order = np.lexsort((np.arange(len(p)), -p))
        if top_k:
            keep[order[top_k:]] = False
        if top_p < 1.0:
            q = np.where(keep, p, 0.0)
            q /= q.sum()
            before = np.cumsum(q[order]) - q[order]
            keep[order[before >= top_p]] = False
    if sampling.get("min_p"):
        keep &= p >= sampling["min_p"] * p.max()
    p = np.where(keep, p, 0.0)
    return p / p.sum()


def logprob_gap(row: np.ndarray, token: int, said: list) -> float:
    """How far what was said of one token is from the truth."""
    x = row.astype(np.float64)
    truth = x - x.max() - math.log(np.exp(x - x.max()).sum())
    chosen, top = said
    gaps = [abs(chosen - truth[token])] + [abs(value - truth[one]) for one, value in top]
    if top:
        left_out = np.delete(truth, [one for one, _ in top])
        gaps.append(max(0.0, float(left_out.max()) - min(value for _, value in top)))
    return max(gaps)


def judge(model: torch.nn.Module, case: dict) -> dict:
    """The verdict on one case."""
    prompt, generated = case["tokens"], case["generated"]
    ids = torch.tensor([prompt + generated[:-1]])
    with torch.inference_mode():
        logits = model(input_ids=ids, logits_to_keep=len(generated)).logits[0].float().numpy()
    sampling = case.get("sampling") or {}
    plain = not any(
        sampling.get(name)
        for name in ("temperature", "presence_penalty", "frequency_penalty", "logit_bias", "repetition_penalty", "mask")
    )
    max_gap, argmax, mismatches = 0.0, 0, []
    gaps = [
        logprob_gap(logits[index], token, said)
        for index, (token, said) in enumerate(zip(generated, case.get("logprobs") or [], strict=False))
    ]
    for index, token in enumerate(generated):
        row = logits[index]
        best = int(np.argmax(row))
        argmax += token == best
        if plain:
            max_gap = max(max_gap, float(row[best] - row[token]))
            continue
        x = shaped(row, sampling, prompt, generated[:index])
        if sampling.get("temperature", 0.0) == 0.0:
            expected = int(np.argmax(x))
            distance = float(x[expected] - x[token])
        else:
            p = filtered(x, sampling)
            u = philox_uniform(sampling["seed"], len(prompt) + index, case.get("choice", 0))
            cumulative = np.cumsum(p)
            expected = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
            distance = float(min(abs(u - cumulative[token]), abs(u - (cumulative[token] - p[token]))))
        if expected != token:
            mismatches.append({"index": index, "expected": expected, "token": token, "distance": distance})
    return {
        "id": case["id"],
        "tokens": len(generated),
        "max_gap": max_gap,
        "argmax": argmax,
        "mismatches": mismatches,
        "logprob_gap": max(gaps, default=0.0),
    }


def main() -> None:
    """Entry point."""
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="sdpa").eval()
    for line in sys.stdin:
        if line.strip():
            print(json.dumps(judge(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
