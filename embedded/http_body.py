"""Reading the body of an HTTP request: chunked, compressed, as a form; always within a limit."""

import email.parser
import email.policy
import sys
import zlib
from collections.abc import Callable, Iterator
from email.message import Message
from http import HTTPStatus
from io import BufferedIOBase
from typing import Final

import lz4.frame  # type: ignore[import-untyped]  # the package ships no types

# Both codecs come with clickhouse-connect, so they are there whenever its client sends them.
if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MAX_BODY_BYTES: Final = 256 * 1024 * 1024
MAX_LINE_BYTES: Final = 4096


class BadBodyError(Exception):
    """The body is not what its headers say."""

    status = HTTPStatus.BAD_REQUEST


class BodyTooLargeError(BadBodyError):
    """The body is larger than this server takes."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE

    def __init__(self) -> None:
        super().__init__(f"A request body may have {MAX_BODY_BYTES} bytes at most.")


def read_body(stream: BufferedIOBase, headers: Message) -> bytes:
    """Read the whole body, decompressed.

    Raises BadBodyError; the connection is then in an unknown state.
    """
    if headers.get("Transfer-Encoding", "").lower() == "chunked":
        body = join(read_chunks(stream))
    else:
        length = headers.get("Content-Length", "0")
        if not length.isdecimal():
            raise BadBodyError("Content-Length is not a number.")
        if int(length) > MAX_BODY_BYTES:
            raise BodyTooLargeError
        body = read_exactly(stream, int(length))
    return decompress(body, headers.get("Content-Encoding", "identity").lower())


def read_chunks(stream: BufferedIOBase) -> Iterator[bytes]:
    """Yield the chunks of a chunked body."""
    while True:
        line = stream.readline(MAX_LINE_BYTES)
        try:
            length = int(line.split(b";")[0], 16)
        except ValueError:
            raise BadBodyError("The size of a chunk is not a number.") from None
        if not 0 <= length <= MAX_BODY_BYTES:
            raise BodyTooLargeError
        if length == 0:
            while stream.readline(MAX_LINE_BYTES).strip():
                pass
            return
        yield read_exactly(stream, length)
        stream.readline(MAX_LINE_BYTES)


def read_exactly(stream: BufferedIOBase, length: int) -> bytes:
    """Read this many bytes; a connection that ends early is an error, never a shorter body."""
    body = stream.read(length)
    if len(body) != length:
        raise BadBodyError("The connection ended in the middle of the body.")
    return body


def join(parts: Iterator[bytes]) -> bytes:
    """Put the parts together, giving up past the limit."""
    whole = bytearray()
    for part in parts:
        whole += part
        if len(whole) > MAX_BODY_BYTES:
            raise BodyTooLargeError
    return bytes(whole)


def decompress(body: bytes, encoding: str) -> bytes:
    """Undo the content encoding, never producing more than the limit."""
    if encoding in ("", "identity"):
        return body
    if encoding not in DECOMPRESSORS:
        raise BadBodyError(f"Content-Encoding {encoding!r} is not supported.")
    try:
        return DECOMPRESSORS[encoding](body)
    except BadBodyError:
        raise
    except Exception as exc:
        # Each codec raises errors of its own.
        raise BadBodyError(f"The body is not valid {encoding}: {exc}") from exc


def decompress_zlib(body: bytes, window_bits: int) -> bytes:
    """Decompress gzip or zlib data."""
    codec = zlib.decompressobj(window_bits)
    return within_limit(codec.decompress(body, MAX_BODY_BYTES + 1), codec.eof)


def decompress_zstd(body: bytes) -> bytes:
    """Decompress Zstandard frames, one after the other."""
    whole, rest = b"", body
    while rest:
        codec = zstd.ZstdDecompressor()
        whole += codec.decompress(rest, MAX_BODY_BYTES + 1 - len(whole))
        rest = codec.unused_data
        within_limit(whole, codec.eof)
    return whole


def decompress_lz4(body: bytes) -> bytes:
    """Decompress LZ4 frames, one after the other."""
    whole, rest = b"", body
    while rest:
        codec = lz4.frame.LZ4FrameDecompressor()
        whole += codec.decompress(rest, MAX_BODY_BYTES + 1 - len(whole))
        rest = codec.unused_data or b""
        within_limit(whole, codec.eof)
    return whole


def within_limit(body: bytes, complete: bool) -> bytes:
    """Return the body if it is whole; say what is wrong if not."""
    if len(body) > MAX_BODY_BYTES:
        raise BodyTooLargeError
    if not complete:
        raise BadBodyError("The compressed body ends early.")
    return body


DECOMPRESSORS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "gzip": lambda body: decompress_zlib(body, 16 + zlib.MAX_WBITS),
    "deflate": lambda body: decompress_zlib(body, zlib.MAX_WBITS),
    "zstd": decompress_zstd,
    "lz4": decompress_lz4,
}


def read_form(body: bytes, content_type: str) -> dict[str, str]:
    """Read the text fields of a multipart form, as clients send them for long parameters."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode()
    message: Message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
    fields = {}
    for part in message.walk():
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(content, bytes):
            fields[name] = content.decode()
    return fields
