from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FrameKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FRAME_KIND_UNSPECIFIED: _ClassVar[FrameKind]
    FRAME_KIND_DATA: _ClassVar[FrameKind]
    FRAME_KIND_ACK: _ClassVar[FrameKind]
    FRAME_KIND_CLOSE: _ClassVar[FrameKind]
    FRAME_KIND_PING: _ClassVar[FrameKind]
    FRAME_KIND_PONG: _ClassVar[FrameKind]

class CloseReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOSE_REASON_UNSPECIFIED: _ClassVar[CloseReason]
    CLOSE_REASON_DONE: _ClassVar[CloseReason]
    CLOSE_REASON_NO_ROUTE: _ClassVar[CloseReason]
    CLOSE_REASON_CHANNEL_CLOSED: _ClassVar[CloseReason]
    CLOSE_REASON_RESOURCE_EXHAUSTED: _ClassVar[CloseReason]
    CLOSE_REASON_CORRUPT: _ClassVar[CloseReason]
    CLOSE_REASON_RETIRED: _ClassVar[CloseReason]
    CLOSE_REASON_SHUTDOWN: _ClassVar[CloseReason]
    CLOSE_REASON_IDLE: _ClassVar[CloseReason]
    CLOSE_REASON_CANCELLED: _ClassVar[CloseReason]
    CLOSE_REASON_PEER_LOST: _ClassVar[CloseReason]
    CLOSE_REASON_PROTOCOL: _ClassVar[CloseReason]
FRAME_KIND_UNSPECIFIED: FrameKind
FRAME_KIND_DATA: FrameKind
FRAME_KIND_ACK: FrameKind
FRAME_KIND_CLOSE: FrameKind
FRAME_KIND_PING: FrameKind
FRAME_KIND_PONG: FrameKind
CLOSE_REASON_UNSPECIFIED: CloseReason
CLOSE_REASON_DONE: CloseReason
CLOSE_REASON_NO_ROUTE: CloseReason
CLOSE_REASON_CHANNEL_CLOSED: CloseReason
CLOSE_REASON_RESOURCE_EXHAUSTED: CloseReason
CLOSE_REASON_CORRUPT: CloseReason
CLOSE_REASON_RETIRED: CloseReason
CLOSE_REASON_SHUTDOWN: CloseReason
CLOSE_REASON_IDLE: CloseReason
CLOSE_REASON_CANCELLED: CloseReason
CLOSE_REASON_PEER_LOST: CloseReason
CLOSE_REASON_PROTOCOL: CloseReason

class Frame(_message.Message):
    __slots__ = ("kind", "seq", "crc32", "items")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    kind: FrameKind
    seq: int
    crc32: int
    items: _containers.RepeatedCompositeFieldContainer[Item]
    def __init__(self, kind: _Optional[_Union[FrameKind, str]] = ..., seq: _Optional[int] = ..., crc32: _Optional[int] = ..., items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("conn_id", "payload")
    CONN_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    conn_id: int
    payload: bytes
    def __init__(self, conn_id: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: CloseReason
    detail: str
    def __init__(self, reason: _Optional[_Union[CloseReason, str]] = ..., detail: _Optional[str] = ...) -> None: ...
