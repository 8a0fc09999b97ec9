"""A second implementation of schema/FORMAT.md, written from that page alone. It never imports kvstore.

Everything a reader needs is here: names (sections 1 to 3), block objects (4), keys (5), and how stored values are judged (6).
`None` stands for what must be refused.
"""

import json
import re
import struct

import zstandard
from blake3 import blake3

WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "U32": 4}
TEXTS = ["model", "revision", "rope", "quantization", "lora", "dtype", "layout", "fidelity", "tenant", "identity"]
NUMBERS = ["layers", "kv_heads", "head_dim", "mla_rank", "mla_rope", "page_bytes", "block_tokens"]


def H(data):
    return blake3(data).digest()


def F(*parts):
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


# 1. Namespace


def number(value):
    """As ECMAScript prints it."""
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 1e16:
        return str(int(value))
    if 1e-6 <= abs(value) < 1e21:
        return _plain(value)
    mantissa, _, exponent = repr(value).partition("e")
    return f"{mantissa.removesuffix('.0')}e{'-' if exponent[0] == '-' else '+'}{exponent.lstrip('+-').lstrip('0')}"


def _plain(value):
    mantissa, _, exponent = repr(abs(value)).partition("e")
    whole, _, part = mantissa.partition(".")
    part = "" if part == "0" else part
    digits, point = whole + part, len(whole) + int(exponent or 0)
    digits = "0" * max(0, 1 - point) + digits
    point = max(1, point)
    digits = digits.ljust(point, "0")
    return ("-" if value < 0 else "") + (digits[:point] + "." + digits[point:]).rstrip("0").rstrip(".")


def canonical(value):
    if isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{canonical(k)}:{canonical(value[k])}" for k in sorted(value, key=lambda k: k.encode("utf-16-be")))
            + "}"
        )
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return number(value)
    return json.dumps(value, ensure_ascii=False)  # the escapes of section 1 are those of this module


def namespace_is_valid(ns):
    if set(ns) != {*TEXTS, *NUMBERS, "groups"}:
        return False
    texts_ok = all(isinstance(ns[f], str) and len(ns[f].encode()) <= 4096 and (ns[f] or f in ("rope", "lora")) for f in TEXTS)
    if not texts_ok or not all(type(ns[f]) is int for f in NUMBERS) or ns["dtype"] not in WIDTH:
        return False
    if not (1 <= ns["layers"] <= 4096 and 1 <= ns["block_tokens"] <= 8192 and 0 <= ns["page_bytes"] <= 2**30):
        return False
    if not all(0 <= ns[f] <= 65536 for f in ("kv_heads", "head_dim", "mla_rank", "mla_rope")):
        return False
    heads, mla, page = ns["kv_heads"] > 0 and ns["head_dim"] > 0, ns["mla_rank"] > 0, ns["page_bytes"] > 0
    if heads + mla + page != 1 or page == (ns["layout"] == "canonical"):
        return False
    if (ns["kv_heads"] and not heads) or (ns["mla_rope"] and not mla):
        return False
    groups = ns["groups"]
    if not 1 <= len(groups) <= 64:
        return False
    for group in groups:
        if set(group) != {"kind", "layers", "window"} or group["kind"] not in ("full", "window", "state"):
            return False
        if (group["window"] > 0) != (group["kind"] == "window") or group["layers"] != sorted(set(group["layers"])):
            return False
    named = sorted(layer for group in groups for layer in group["layers"])
    return named == list(range(ns["layers"])) or (len(groups) == 1 and not named)


def namespace_id(ns):
    return H(canonical(ns).encode()).hex()


# 2. PrefixIds


def chain(ns, tokens, extra, partial):
    root = parent = bytes.fromhex(namespace_id(ns))
    size, blocks = ns["block_tokens"], []
    for index, at in enumerate(range(0, len(tokens), size)):
        part = tokens[at : at + size]
        if len(part) < size and not partial:
            break
        keys = [bytes.fromhex(key) for key in extra.get(str(index), [])]
        packed = struct.pack(f"<{len(part)}I", *part)
        parent = H(F(b"kvtier.prefix.1", root, parent, packed, struct.pack("<I", len(keys)), *keys))
        blocks.append([parent.hex(), len(part)])
    return blocks


def engine_id(ns, key):
    return H(F(b"kvtier.engine.1", bytes.fromhex(namespace_id(ns)), key)).hex()


# 3. Shards


def shard(text):
    match = re.fullmatch(r"t([0-9]+)of([0-9]+)\.p([0-9]+)of([0-9]+)\.g([0-9]+)", text)
    if not match:
        return None
    rank, ranks, stage, stages, group = map(int, match.groups())
    if not (rank < ranks <= 4096 and stage < stages <= 4096 and group < 64):
        return None
    return (rank, ranks, stage, stages, group) if text == f"t{rank}of{ranks}.p{stage}of{stages}.g{group}" else None


def tier_key(namespace, shard_text, prefix_id):
    return H(F(b"kvtier.tier.1", namespace.encode(), shard_text.encode(), prefix_id.encode())).hex()


# 4. Block objects


def tensors(ns, shard_text, tokens):
    """[name, dtype, shape] of each raw tensor in storage order."""
    _rank, ranks, stage, stages, group = shard(shard_text)
    if not 1 <= tokens <= ns["block_tokens"] or group >= len(ns["groups"]):
        return None
    runs, at = [], 0
    for index in range(stages):
        length = ns["layers"] // stages + (index < ns["layers"] % stages)
        runs.append(range(at, at + length))
        at += length
    member = ns["groups"][group]
    layers = [layer for layer in member["layers"] or range(ns["layers"]) if layer in runs[stage]]
    if not layers:
        return None
    if ns["page_bytes"]:
        if ns["page_bytes"] % WIDTH[ns["dtype"]]:
            return None
        parts = [("state" if member["kind"] == "state" else "kv", [ns["page_bytes"] // WIDTH[ns["dtype"]]])]
    elif member["kind"] == "state":
        return None
    elif ns["mla_rank"]:
        if ranks != 1:
            return None
        parts = [("c", [tokens, ns["mla_rank"] + ns["mla_rope"]])]
    else:
        heads = ns["kv_heads"]
        if ranks <= heads and heads % ranks or ranks > heads and ranks % heads:
            return None
        shape = [tokens, heads // ranks if ranks <= heads else 1, ns["head_dim"]]
        parts = [("k", shape), ("v", shape)]
    found = [[f"layers.{layer}.{part}", ns["dtype"], shape] for layer in layers for part, shape in parts]
    if ns["identity"] == "tokens":
        found.append(["token_ids", "U32", [tokens]])
    return found


def size_of(tensor):
    size = WIDTH[tensor[1]]
    for dimension in tensor[2]:
        size *= dimension
    return size


def shape_text(shape):
    return "[" + ",".join(map(str, shape)) + "]"


def header(ns, shard_text, prefix_id, tokens, codec, sizes, digests, raw_digests=""):
    raw = tensors(ns, shard_text, tokens)
    shapes = ";".join(dtype + shape_text(shape) for _, dtype, shape in raw)
    field = "" if codec == "raw" else f',"raw":"{shapes}","raw_digests":"{raw_digests}"'
    entries, at = "", 0
    for (name, dtype, shape), size in zip(raw, sizes, strict=True):
        if codec != "raw":
            dtype, shape = "U8", [size]
        entries += f',"{name}":{{"dtype":"{dtype}","shape":{shape_text(shape)},"data_offsets":[{at},{at + size}]}}'
        at += size
    text = (
        f'{{"__metadata__":{{"kvtier":"1","digest":"{"0" * 64}","namespace":"{namespace_id(ns)}","shard":"{shard_text}",'
        f'"prefix_id":"{prefix_id}","tokens":"{tokens}","codec":"{codec}","enc":"none"{field},"digests":"{digests}"}}{entries}}}'
    ).encode()
    length = -(-(8 + len(text)) // 4096) * 4096
    whole = struct.pack("<Q", length - 8) + text + b" " * (length - 8 - len(text))
    digest = H(whole).hex().encode()
    return whole[:48] + digest + whole[112:]


def read(data, ns, shard_text, prefix_id, tokens):
    """The raw tensors of a stored object as {name: bytes}, or None where a reader must refuse it."""
    raw = tensors(ns, shard_text, tokens)
    if len(data) < 8:
        return None
    length = 8 + struct.unpack("<Q", data[:8])[0]
    if length % 4096 or length > -(-(1024 + 256 * len(raw)) // 4096) * 4096 or len(data) < length:
        return None
    head, payload = data[:length], data[length:]
    if H(head[:48] + b"0" * 64 + head[112:]).hex().encode() != head[48:112]:
        return None
    codec = re.search(rb'"codec":"(raw|zstd|bp-zstd)"', head)
    digests = re.search(rb'"digests":"([0-9a-f]*)"', head)
    ends = [0, *(int(end) for end in re.findall(rb'"data_offsets":\[[0-9]{1,12},([0-9]{1,12})\]', head))]
    if not codec or not digests or len(ends) != len(raw) + 1 or len(digests[1]) != 64 * len(raw):
        return None
    codec, digests = codec[1].decode(), digests[1].decode()
    raw_digests = re.search(rb'"raw_digests":"([0-9a-f]*)"', head)
    raw_digests = raw_digests[1].decode() if raw_digests else ""
    if len(raw_digests) != (0 if codec == "raw" else 64 * len(raw)):
        return None
    sizes = [end - start for start, end in zip(ends, ends[1:])]
    if header(ns, shard_text, prefix_id, tokens, codec, sizes, digests, raw_digests) != head or len(payload) != ends[-1]:
        return None
    found = {}
    for index, tensor in enumerate(raw):
        stored = payload[ends[index] : ends[index + 1]]
        if H(stored).hex() != digests[64 * index :][:64]:
            return None
        plain = decoded(codec, stored, size_of(tensor), WIDTH[tensor[1]])
        if plain is None:
            return None
        found[tensor[0]] = plain
    return found


def decoded(codec, stored, size, width):
    if codec == "raw":
        return stored if len(stored) == size else None
    if not 1 <= len(stored) <= size + size // 128 + 128:
        return None
    if codec == "zstd" or width != 2:
        return frame(stored, size)
    low, high = stored[: size // 2], frame(stored[size // 2 :], size // 2)
    if high is None:
        return None
    both = bytearray(size)
    both[0::2], both[1::2] = low, high
    return bytes(both)


def frame(data, size):
    if data[:4] != b"\x28\xb5\x2f\xfd":
        return None
    try:
        declared = zstandard.get_frame_parameters(data)
        if declared.content_size != size or not declared.has_checksum or declared.dict_id or declared.window_size > 8 << 20:
            return None
        return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)
    except zstandard.ZstdError:
        return None


# 5. Keys


def id_is_valid(text):
    data = text.encode()
    if not 1 <= len(data) <= 512:
        return False
    once = re.sub(rb"%([0-9A-Fa-f]{2})", lambda m: bytes([int(m[1], 16)]), data).decode(errors="replace")
    for form in (text, once):
        if any(ord(c) < 0x20 or 0x7F <= ord(c) <= 0x9F for c in form) or {".", ".."} & set(form.split("/")):
            return False
    return True


def segment(text):
    free = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
    found = "".join(chr(byte) if byte in free else f"%{byte:02X}" for byte in text.encode())
    if set(found) == {"."}:
        found = found.replace(".", "%2E")
    return found if len(found) <= 255 else "=" + H(text.encode()).hex()


def whole_keys(case):
    root, tenant, ns = case["root"] + "/", segment(case["tenant"]), case["namespace"]
    gen = f"{case['gen']:010d}"
    return {
        "format": f"{root}format.json",
        "epoch": f"{root}epoch",
        "namespace": f"{root}namespaces/{ns}.json",
        "block": f"{root}blocks/{ns}/{case['shard']}/{case['prefix_id']}/{gen}",
        "head": f"{root}heads/{tenant}/{case['family']}",
        "manifest": f"{root}manifests/{tenant}/{case['family']}/{gen}-{case['id']}",
        "name": f"{root}names/{tenant}/{segment(case['session'])}/{ns}/{case['lane']}",
    }


# 6. Stored values


def sealed(fields, key):
    """The JSON text of an object, as it is stored at `key` (under the root)."""
    rest = '"}' if fields == "{}" else '",' + fields[1:]
    return '{"digest":"' + H(('{"digest":"' + "0" * 64 + rest + key).encode()).hex() + rest


def value_is(text, key, schema_is_met):
    """`valid`, `corrupt` or `unknown` (a version to refuse). `schema_is_met` applies the JSON Schema of the kind."""
    body = text.encode()
    blank = b'{"digest":"' + b"0" * 64
    if body[:11] != blank[:11] or body[11:75].decode(errors="replace") != H(blank + body[75:] + key.encode()).hex():
        return "corrupt"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "corrupt"
    if not isinstance(value, dict) or type(value.get("v")) is not int:
        return "corrupt"
    if value["v"] != 1:
        return "unknown"
    return "valid" if schema_is_met(value) else "corrupt"
