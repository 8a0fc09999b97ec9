"""How a directory looks inside a Valkey: names of keys, entries, and the scripts that change them. Each touches one hash slot.

An entry says who has a block. Entries stand in 65,536 hashes ("buckets"), under the first 8 bytes of the block's key: two name the
bucket, six the field. The value is the incarnations that have it, five bytes each. A small hash is one listpack, a run of bytes
without a pointer, so that an entry costs little more than its own 10 bytes; a listpack ends at 512 entries
(`hash-max-listpack-entries`), which is 33 million blocks, and holds values of at most 64 bytes, hence at most 12 holders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.errors import Invalid

FORMAT: Final = 1
BUCKETS: Final = 1 << 16
SHORT: Final = 8  # bytes of a key that an entry is found by: enough that two of 10 million blocks meet once in some 370,000 meshes
MOST_HOLDERS: Final = 12
WIDTH: Final = 5  # bytes of an incarnation: milliseconds since 2025 until 2059
_MESH: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_BUCKET_TTL_MS: Final = 86_400_000  # a mesh that is gone leaves nothing behind for longer than that

Command = tuple[bytes | str | int, ...]


class Script:
    """A script by its text; servers know it by its digest once it was loaded."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()

    def call(self, keys: Sequence[str], *arguments: bytes | str | int) -> Command:
        """The command that runs it."""
        return ("EVALSHA", self.digest, len(keys), *keys, *arguments)


# A lease is a line in one hash: incarnation, when it ends by the server's clock (ms), port, host. A caller whose line is missing or
# ended gets an incarnation that is new: what others found to be over is never true again. An incarnation is above all before it and
# the caller's last, and not below the clock in milliseconds, so that a server that lost everything gives out no number again. The
# answer: the caller's incarnation, whether a later life has its place, the highest incarnation so far, a version that changes with
# the members, and the members unless the caller knows that version.
RENEW: Final = Script("""
local node, mine, lease, where, known = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local clock = now - 1735689600000
local state = redis.call('HMGET', KEYS[2], 'newest', 'version')
local newest, version = tonumber(state[1] or '0'), state[2]
local changed = not version
local lines = redis.call('HGETALL', KEYS[1])
local members, listed, replaced = {}, false, 0
for i = 1, #lines, 2 do
  local life, ends = string.match(lines[i + 1], '^(%d+) (%d+) ')
  life, ends = tonumber(life or '0'), tonumber(ends or '0')
  if lines[i] == node then
    if mine > 0 and life > mine and ends > now then
      replaced = 1
    elseif life == mine and ends > now then
      listed = true
    end
  end
  if ends <= now and lines[i] ~= node then
    redis.call('HDEL', KEYS[1], lines[i])
    changed = true
  elseif lines[i] ~= node or replaced == 1 then
    members[#members + 1] = lines[i]
    members[#members + 1] = lines[i + 1]
  end
end
if replaced == 0 then
  if not listed then
    mine = math.max(newest + 1, mine + 1, clock)
    changed = true
  end
  local line = string.format('%.0f %.0f %s', mine, now + lease, where)
  redis.call('HSET', KEYS[1], node, line)
end
if changed then
  version = time[1] .. '.' .. time[2]
  newest = math.max(newest, mine)
  redis.call('HSET', KEYS[2], 'newest', string.format('%.0f', newest), 'version', version)
end
redis.call('PEXPIRE', KEYS[1], 86400000)
redis.call('PEXPIRE', KEYS[2], 86400000)
if version == known then members = false end
return {mine, replaced, newest, version, members}
""")

LEAVE: Final = Script("""
local line = redis.call('HGET', KEYS[1], ARGV[1])
if line and string.match(line, '^(%d+) ') == ARGV[2] then
  local time = redis.call('TIME')
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('HSET', KEYS[2], 'version', time[1] .. '.' .. time[2])
end
""")

# The members for somebody who is none: the highest incarnation so far, the version, and the members unless that is known.
OBSERVE: Final = Script("""
local state = redis.call('HMGET', KEYS[2], 'newest', 'version')
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local lines, members, ended = redis.call('HGETALL', KEYS[1]), {}, false
for i = 1, #lines, 2 do
  local ends = string.match(lines[i + 1], '^%d+ (%d+) ')
  if tonumber(ends or '0') > now then
    members[#members + 1] = lines[i]
    members[#members + 1] = lines[i + 1]
  else
    ended = true
  end
end
if state[2] == ARGV[1] and not ended then members = false end
return {tonumber(state[1] or '0'), state[2] or '', members}
""")

_PLACES = """
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then redis.call('DEL', KEYS[1]) end -- what stands under our name and is not ours
local function find(value, life)
  for at = 1, #value - 4, 5 do
    if string.sub(value, at, at + 4) == life then return at end
  end
end
local function without(value, at) return string.sub(value, 1, at - 1) .. string.sub(value, at + 5) end
local function with(value, life)
  if #value >= 60 then value = string.sub(value, 6) end
  return value .. life
end
"""

# Adds one life to the first fields, and takes it from the others. A full entry loses the life that was said first.
CHANGE: Final = Script(
    _PLACES
    + """
local life, added = ARGV[1], tonumber(ARGV[3])
for i = 4, #ARGV do
  local field = ARGV[i]
  local value = redis.call('HGET', KEYS[1], field)
  local at = value and find(value, life)
  if i - 3 <= added then
    if not at then redis.call('HSET', KEYS[1], field, with(value or '', life)) end
  elseif at then
    local left = without(value, at)
    if left == '' then redis.call('HDEL', KEYS[1], field) else redis.call('HSET', KEYS[1], field, left) end
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
)

# Makes one life's entries in a bucket exactly these fields; where the living are told, takes all others that are not newer than
# `newest` from everywhere in it. The answer: how many were added, taken, and taken from the dead.
CORRECT: Final = Script(
    _PLACES
    + """
local life, newest, living = ARGV[1], tonumber(ARGV[3]), ARGV[4]
local function number(one)
  local a, b, c, d, e = string.byte(one, 1, 5)
  return (((a * 256 + b) * 256 + c) * 256 + d) * 256 + e
end
local held, added, taken, dead = {}, 0, 0, 0
for i = 5, #ARGV do held[ARGV[i]] = true end
local lives = {}
for at = 1, #living - 4, 5 do lives[string.sub(living, at, at + 4)] = true end
local entries = redis.call('HGETALL', KEYS[1])
for i = 1, #entries, 2 do
  local field, value = entries[i], entries[i + 1]
  local kept = value
  if #living > 0 then
    for at = #kept - 4, 1, -5 do
      local one = string.sub(kept, at, at + 4)
      if not lives[one] and one ~= life and number(one) <= newest then
        kept = without(kept, at)
        dead = dead + 1
      end
    end
  end
  local at = string.find(kept, life, 1, true) and find(kept, life)
  if held[field] then
    held[field] = nil
    if not at then kept = with(kept, life); added = added + 1 end
  elseif at then
    kept = without(kept, at)
    taken = taken + 1
  end
  if kept == '' then
    redis.call('HDEL', KEYS[1], field)
  elseif kept ~= value then
    redis.call('HSET', KEYS[1], field, kept)
  end
end
for field in pairs(held) do
  redis.call('HSET', KEYS[1], field, life)
  added = added + 1
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {added, taken, dead}
"""
)

SCRIPTS: Final = (RENEW, OBSERVE, LEAVE, CHANGE, CORRECT)


def bucket_of(key: bytes) -> int:
    """Where a block's entry stands."""
    return key[0] << 8 | key[1]


def pack(lives: Iterable[int]) -> bytes:
    """Incarnations as an entry has them."""
    return b"".join(life.to_bytes(WIDTH, "big") for life in lives)


def unpack(value: bytes) -> tuple[int, ...]:
    """The incarnations of an entry; of one that is damaged, whatever can be read."""
    end = min(len(value) // WIDTH, MOST_HOLDERS) * WIDTH
    return tuple(int.from_bytes(value[at : at + WIDTH], "big") for at in range(0, end, WIDTH))


class Names:
    """The keys of one mesh. Several meshes, and other software, may share a server.

    Raises:
        Invalid: The mesh's name has other than 1 to 64 letters, digits, dots, dashes and underscores.
    """

    def __init__(self, mesh: str) -> None:
        if not 1 <= len(mesh) <= 64 or not _MESH.issuperset(mesh):
            raise Invalid("a mesh's name has 1 to 64 letters, digits, dots, dashes and underscores")
        self._prefix = f"kvtier:{FORMAT}:{mesh}:"
        tag = f"kvtier:{FORMAT}:{{{mesh}}}:"  # the braces keep both in one slot of a cluster
        self.membership = (f"{tag}members", f"{tag}state")

    def bucket(self, number: int) -> str:
        """One of the hashes."""
        return f"{self._prefix}{number:04x}"

    def look(self, key: bytes) -> Command:
        """Who has this block."""
        return ("HGET", self.bucket(bucket_of(key)), key[2:SHORT])

    def change(self, bucket: int, life: int, added: Sequence[bytes], dropped: Sequence[bytes]) -> Command:
        """This life has these blocks of a bucket, and those no more; each by its first 8 bytes."""
        fields = [short[2:SHORT] for short in (*added, *dropped)]
        return CHANGE.call([self.bucket(bucket)], pack([life]), _BUCKET_TTL_MS, len(added), *fields)

    def correct(self, bucket: int, life: int, held: Iterable[bytes], newest: int, living: bytes) -> Command:
        """This life has exactly these blocks of a bucket, each by its first 8 bytes."""
        fields = [short[2:SHORT] for short in held]
        return CORRECT.call([self.bucket(bucket)], pack([life]), _BUCKET_TTL_MS, newest, living, *fields)
