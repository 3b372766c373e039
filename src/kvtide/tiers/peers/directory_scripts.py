"""The scripts of the directory, and the keys that they use. ``kvtide.testing.simulated_valkey`` has the same in Python.

There are two kinds of places, and each is at one server, since its keys have one hash tag:

- *members*, one for the cluster: who is a member, until when. Its times are those of its server, in milliseconds, so
  that no node's clock matters. Each script begins by removing members whose lease has ended.
    - ``:leases``   sorted set: epoch -> end of the lease
    - ``:members``  hash: epoch -> number (2 bytes), name (16), address
    - ``:state``    hash: ``epoch`` (the last given), ``version`` (changes with the members), ``cursor`` (see ``TURN``)
    - ``:measured`` hash: epoch -> what the member has measured of others (measurements.py); nodes before it have none
- *partitions*, 16 of them: who holds which blocks.
    - two bytes     hash, a *bucket*: field (5 bytes of the block's mark) -> epochs of its holders, 5 bytes each
    - ``:roster``   hash: epoch -> number of the last publish, of those members that may publish here; ``entries``

**Epochs** have to grow even if the server has lost its data, since a partition at another server may still have
entries with old ones. So an epoch is the time in milliseconds, or one more than the last; and if its clock was set
back, the partitions notice that they had the epoch before.

**Publishing** is numbered: a message that was delayed or doubled by the network is ignored, if a later one was run. A
server that lost data, or a replica that took over and had not heard everything, has a lower number than it should, or
does not know the epoch at all; so its members learn that they must publish everything again.

**A full server** (``noeviction``) refuses what stores entries, and nothing else: leases, removals and scrubbing go on.

**A bucket** stays in the compact encoding of small hashes (a listpack) while it has at most 512 entries of at most 64
bytes. So there are at most 12 epochs in an entry: the thirteenth replaces one that the roster does not have any more,
else the oldest. With 262,144 buckets, 100 million
entries fit.
"""

from __future__ import annotations

from kvtide.tiers.peers.measurements import LONGEST_ROW
from kvtide.tiers.shared.valkey_scripts import HashLookup, Script

__all__ = [
    "ABOUT",
    "BASE",
    "BUCKETS",
    "CHECK",
    "ENROL",
    "EPOCH",
    "FIELD",
    "HOLDERS",
    "ITEM",
    "JOIN",
    "KNOWN",
    "LEAVE",
    "LIST",
    "LOOKUP",
    "MEASURED",
    "PARTITIONS",
    "PUBLISH",
    "RENEW",
    "REPORT",
    "SAMPLE",
    "SCRUB",
    "TTL",
    "TURN",
    "WITHDRAW",
]

PARTITIONS = 16
BUCKETS = 1 << 14
"""Of each partition."""
FIELD, EPOCH = 5, 5
"""Bytes of a field, and of an epoch."""
ITEM = 2 + FIELD
"""Bytes by which a block is named in a message: the bucket, then the field; big-endian."""
ABOUT = 18
"""Bytes of what is known of a member, before its address."""
HOLDERS = 12
"""The most holders of an entry."""
BASE = 1_735_689_600_000
"""The time, in milliseconds, from which epochs count: the beginning of 2025. They have 40 bits: until 2059."""
TTL = 86_400_000
"""Milliseconds after which Valkey removes what no live member cares for: a bucket that was not scrubbed."""

_EVEN_IF_FULL = "#!lua flags=allow-oom\n"
"""Begins scripts that also a server runs that has no memory left: they free some, or need little, and leases depend on
them. Only what stores entries is refused then."""

_COUNT = """
  if type(redis.pcall('HINCRBY', roster, 'entries', {})) == 'table' then call('HDEL', roster, 'entries') end
"""
"""Changes the number of entries of a partition; forgets it if it is no number."""

_NOW = f"""{_EVEN_IF_FULL}
local base, ttl = KEYS[1], {TTL}
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function text(number) return string.format('%.0f', number) end
for part, kind in pairs({{[':leases'] = 'zset', [':members'] = 'hash', [':state'] = 'hash', [':measured'] = 'hash'}}) do
  local found = redis.call('TYPE', base .. part).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', base .. part) end  -- somebody else wrote it
end
local function stored(field, below)  -- a number of the state; 0 if there is none that can be right
  local number = tonumber(redis.call('HGET', base .. ':state', field) or '0')
  return number and number >= 0 and number < below and number or 0
end
local function changed()
  redis.call('HSET', base .. ':state', 'version', text(math.max(stored('version', 2 ^ 53) + 1, now)))
end
local function remove(epoch)
  redis.call('ZREM', base .. ':leases', epoch)
  redis.call('HDEL', base .. ':members', epoch)
  redis.call('HDEL', base .. ':measured', epoch)
end
local function alive(epoch)  -- a server that evicts may have lost one of the two
  return redis.call('ZSCORE', base .. ':leases', epoch) and redis.call('HEXISTS', base .. ':members', epoch) == 1
end
local ended = redis.call('ZRANGEBYSCORE', base .. ':leases', '-inf', text(now))
for _, epoch in ipairs(ended) do remove(epoch) end
if #ended > 0 then changed() end
"""

JOIN = Script(
    "join",
    _NOW
    + f"""
local name, address, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
local taken, mine, other = {{}}, nil, ''
local all = redis.call('HGETALL', base .. ':members')
for i = 1, #all, 2 do
  local epoch, about = all[i], all[i + 1]
  if #about < {ABOUT} or not tonumber(epoch) or not redis.call('ZSCORE', base .. ':leases', epoch) then
    remove(epoch)
  else
    local number, who = string.byte(about, 1) * 256 + string.byte(about, 2), string.sub(about, 3, {ABOUT})
    if who ~= name and string.sub(about, {ABOUT + 1}) == address then
      if ARGV[5] == '1' then
        if mine then changed() end
        return {{0, tonumber(epoch), who}}
      end
      other = who
    end
    if who == name or other == who then
      mine = math.min(number, mine or number)
      remove(epoch)
    else
      taken[number] = true
    end
  end
end
local number = mine or 1
while taken[number] do number = number + 1 end
if number > 65535 then return redis.error_reply('FULL too many members') end
local epoch = math.max(stored('epoch', {1 << 8 * EPOCH}) + 1, now - {BASE}, tonumber(ARGV[4]))
redis.call('HSET', base .. ':state', 'epoch', text(epoch))
local value = string.char(math.floor(number / 256), number % 256) .. name .. address
redis.call('HSET', base .. ':members', text(epoch), value)
redis.call('ZADD', base .. ':leases', text(now + lease), text(epoch))
changed()
return {{number, epoch, other}}
""",
)
"""Arguments: name, address, lease in milliseconds, the least epoch, and 1 if the node gives way to another one at that
address. Returns number, epoch, and the name of the member that had the address, or nothing. Other members with that
name or address are members no more: they are earlier incarnations. If the node gives way, it returns 0, and epoch and
name of the other one."""

RENEW = Script(
    "renew",
    _NOW
    + """
if not alive(ARGV[1]) then return 0 end
redis.call('ZADD', base .. ':leases', text(now + tonumber(ARGV[2])), ARGV[1])
for _, part in ipairs({':leases', ':members', ':state'}) do redis.call('PEXPIRE', base .. part, ttl) end
return 1
""",
)
"""Arguments: epoch, lease in milliseconds. Returns whether the member was alive."""

CHECK = Script("check", _NOW + "return alive(ARGV[1]) and 1 or 0")
"""Argument: epoch. Returns whether the member is alive."""

LEAVE = Script("leave", _NOW + "remove(ARGV[1]) changed() return 1")
"""Argument: epoch."""

REPORT = Script(
    "report",
    _NOW
    + """
local measured = base .. ':measured'
if not alive(ARGV[1]) then return 0 end
redis.call('HSET', measured, ARGV[1], ARGV[2])
redis.call('PEXPIRE', measured, ttl)
if redis.call('HLEN', measured) > redis.call('ZCARD', base .. ':leases') then  -- a node that knows no rows removed one
  for _, epoch in ipairs(redis.call('HKEYS', measured)) do
    if not redis.call('ZSCORE', base .. ':leases', epoch) then redis.call('HDEL', measured, epoch) end
  end
end
return 1
""",
)
"""Arguments: epoch, what the member has measured. It is removed with the member. Returns whether it was alive."""

MEASURED = Script(
    "measured",
    _NOW
    + f"""
local found = {{}}
for _, epoch in ipairs(redis.call('ZRANGE', base .. ':leases', 0, -1)) do
  local row = redis.call('HGET', base .. ':measured', epoch)
  if row and #row <= {LONGEST_ROW} then
    found[#found + 1] = epoch
    found[#found + 1] = row
  end
end
return found
""",
)
"""Returns the epoch of each member that has measured others, and its row."""

LIST = Script(
    "list",
    _NOW
    + f"""
local version = redis.call('HGET', base .. ':state', 'version') or '0'
if version == ARGV[1] then return {{version}} end
local found = {{version, text(stored('epoch', {1 << 8 * EPOCH}))}}
local leases = redis.call('ZRANGE', base .. ':leases', 0, -1, 'WITHSCORES')
for i = 1, #leases, 2 do
  local value = redis.call('HGET', base .. ':members', leases[i])
  if value then
    found[#found + 1] = leases[i]
    found[#found + 1] = text(tonumber(leases[i + 1]) - now)
    found[#found + 1] = value
  else
    remove(leases[i])
  end
end
return found
""",
)
"""Argument: the version that is known. Returns the version; if it is another one, also the last epoch, and of each
member epoch, milliseconds until the lease ends, and number, name and address."""

TURN = Script(
    "turn",
    f"""{_EVEN_IF_FULL}
local state = KEYS[1] .. ':state'
local after = redis.pcall('HINCRBY', state, 'cursor', ARGV[1])
if type(after) == 'table' then  -- it is no number: somebody else wrote it
  redis.call('HDEL', state, 'cursor')
  after = redis.call('HINCRBY', state, 'cursor', ARGV[1])
end
return (after - ARGV[1]) % {PARTITIONS * BUCKETS}
""",
)
"""Argument: a number of buckets. Returns the first of those whose turn it is to be scrubbed."""

ENROL = Script(
    "enrol",
    f"""{_EVEN_IF_FULL}
local new = redis.call('HSETNX', KEYS[1] .. ':roster', ARGV[1], '0')
for i = 2, #ARGV do redis.call('HDEL', KEYS[1] .. ':roster', ARGV[i]) end
redis.call('PEXPIRE', KEYS[1] .. ':roster', {TTL})
return new
""",
)
"""Arguments: epoch, and those that the member had before. It may publish in this partition, under that epoch alone.
Returns whether nobody had it before."""

KNOWN = Script(
    "known",
    f"""{_EVEN_IF_FULL}
redis.call('PEXPIRE', KEYS[1] .. ':roster', {TTL})
return tonumber(redis.call('HGET', KEYS[1] .. ':roster', ARGV[1]) or '-1') or -1
""",
)
"""Argument: epoch. Returns the number of its last publish in this partition; -1 if it may not publish."""

LOOKUP = HashLookup("lookup", 2, FIELD, EPOCH)
"""Argument: items. Returns a byte for each, its number of holders, and then all their epochs."""

PUBLISH = Script(
    "publish",
    f"""
local base, roster, epoch = KEYS[1], KEYS[1] .. ':roster', ARGV[1]
local number, me, stored, removed = tonumber(ARGV[2]), ARGV[3], ARGV[5], ARGV[6]
local call, sub = redis.call, string.sub
local last = tonumber(call('HGET', roster, epoch) or '-1') or -1
if last < tonumber(ARGV[4]) then return -1 end
if number <= last then return number == last and 1 or 0 end
local function at(value)
  for i = 1, #value, {EPOCH} do
    if sub(value, i, i + {EPOCH - 1}) == me then return i end
  end
end
local listed = {{}}
local function known(one)
  if listed[one] == nil then
    local whole = 0
    for i = 1, {EPOCH} do whole = whole * 256 + string.byte(one, i) end
    listed[one] = call('HEXISTS', roster, string.format('%.0f', whole)) == 1
  end
  return listed[one]
end
local function shortened(value)
  for i = 1, #value, {EPOCH} do
    if not known(sub(value, i, i + {EPOCH - 1})) then
      return sub(value, 1, i - 1) .. sub(value, i + {EPOCH})
    end
  end
  return sub(value, {EPOCH + 1})
end
local entries = 0
for i = 1, #stored, {ITEM} do
  local key, field = base .. sub(stored, i, i + 1), sub(stored, i + 2, i + {ITEM - 1})
  local value = call('HGET', key, field)
  if not value then
    call('HSET', key, field, me)
    call('PEXPIRE', key, {TTL}, 'NX')
    entries = entries + 1
  elseif not at(value) then
    if #value >= {HOLDERS * EPOCH} then value = shortened(value) end
    call('HSET', key, field, value .. me)
  end
end
for i = 1, #removed, {ITEM} do
  local key, field = base .. sub(removed, i, i + 1), sub(removed, i + 2, i + {ITEM - 1})
  local value = call('HGET', key, field)
  local place = value and at(value)
  if place and #value == {EPOCH} then
    call('HDEL', key, field)
    entries = entries - 1
  elseif place then
    call('HSET', key, field, sub(value, 1, place - 1) .. sub(value, place + {EPOCH}))
  end
end
call('HSET', roster, epoch, ARGV[2])
if entries ~= 0 then {_COUNT.format("entries")} end
return 1
""",
)
"""Arguments: epoch, number of the publish, epoch in 5 bytes, number of the last publish that was acknowledged, items
stored, items removed. Returns 1; 0 if a later publish was run before, and this one not; -1 if the member may not
publish here, or an acknowledged publish was lost."""

WITHDRAW = Script("withdraw", _EVEN_IF_FULL + PUBLISH.text)
"""The same, if nothing is stored: a server that is full runs it."""

SCRUB = Script(
    "scrub",
    f"""{_EVEN_IF_FULL}
local base, roster, live, newest = KEYS[1], KEYS[1] .. ':roster', {{}}, tonumber(ARGV[2])
local first, last = tonumber(ARGV[3]), tonumber(ARGV[4])
local call, sub, byte = redis.call, string.sub, string.byte
local function whole(epoch)
  local number = 0
  for i = 1, {EPOCH} do number = number * 256 + byte(epoch, i) end
  return number
end
for i = 1, #ARGV[1], {EPOCH} do live[sub(ARGV[1], i, i + {EPOCH - 1})] = true end
local function dead(epoch)
  if live[epoch] == nil then live[epoch] = whole(epoch) > newest end
  return not live[epoch]
end
local entries, removed = 0, 0
for bucket = first, last do
  local key = base .. string.char(math.floor(bucket / 256), bucket % 256)
  local all = redis.pcall('HGETALL', key)
  if all.err then  -- it is no hash: somebody else wrote it
    call('DEL', key)
    all = {{}}
  end
  if #all > 0 then call('PEXPIRE', key, {TTL}) end
  for i = 1, #all, 2 do
    local value, kept = all[i + 1], nil
    if #value % {EPOCH} ~= 0 or #value > {HOLDERS * EPOCH} or #all[i] ~= {FIELD} then value, kept = '', '' end
    for j = 1, #value, {EPOCH} do
      if dead(sub(value, j, j + {EPOCH - 1})) then
        kept = kept or sub(value, 1, j - 1)
        removed = removed + 1
      elseif kept then
        kept = kept .. sub(value, j, j + {EPOCH - 1})
      end
    end
    if kept == '' then
      call('HDEL', key, all[i])
      entries = entries + 1
    elseif kept then
      call('HSET', key, all[i], kept)
    end
  end
end
local decimal = {{}}
for epoch, alive in pairs(live) do if alive then decimal[string.format('%.0f', whole(epoch))] = true end end
local listed = redis.pcall('HKEYS', roster)
if listed.err then call('DEL', roster) end  -- the members that published here notice it, and join again
for _, epoch in ipairs(listed) do
  local number = tonumber(epoch)
  if number and number <= newest and not decimal[epoch] then call('HDEL', roster, epoch) end
end
if entries > 0 then {_COUNT.format("-entries")} end
call('PEXPIRE', roster, {TTL})
return removed
""",
)
"""Arguments: the live epochs, 5 bytes each; the newest epoch when these were listed; the first bucket, and the last.
Removes older epochs that are not live, and whatever no node has written; returns how many epochs there were."""

SAMPLE = Script(
    "sample",
    """
local base, first, last, nbytes = KEYS[1], tonumber(ARGV[1]), tonumber(ARGV[2]), 0
for bucket = first, last do
  local key = base .. string.char(math.floor(bucket / 256), bucket % 256)
  nbytes = nbytes + (redis.call('MEMORY', 'USAGE', key, 'SAMPLES', 0) or 0)
end
return {tonumber(redis.call('HGET', base .. ':roster', 'entries') or '0') or 0, nbytes}
""",
)
"""Arguments: the first bucket and the last. Returns the entries of the partition, and the bytes of these buckets."""
