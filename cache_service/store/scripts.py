"""Lua scripts of the shared cache. Each is one atomic step of constant cost, except for trimming a folded log.

A namespace lives as long as its epoch, whose time to live is never shortened: an import kept for a year stays for that
year although traffic, which is kept for days, is written to the same namespace.

Every key is named in KEYS, and all keys of a call belong to one namespace and thus to one hash slot. The buckets of
tenants' limits, which belong to none, have one slot together.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Script:
    text: str
    sha1: str


def _script(text: str) -> Script:
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


# Extends the epoch to `seconds` if it has less left, and gives the other keys the same time to live.
_LIVE = """
local function live(epoch, seconds, others)
  local left, least = redis.call('PTTL', epoch), 1000 * seconds
  if left < least then redis.call('PEXPIRE', epoch, least) end
  local found = 0
  for _, key in ipairs(others) do found = found + redis.call('PEXPIRE', key, math.max(left, least)) end
  return found
end
"""

ACQUIRE_LEASE = _script("""
-- KEYS: lease, fence, manifest. ARGV: owner, milliseconds of the lease, seconds that the fence lives.
-- Returns the fencing token of the lease, or 0 if another owner holds it.
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
local token = tonumber(redis.call('GET', KEYS[2]) or '0')
local written = tonumber(redis.call('HGET', KEYS[3], 'token') or '0')
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if not owner or token < 1 or token < written then
  -- A lost fence continues after the tokens granted before.
  token = math.max(token, written) + 1
end
redis.call('SET', KEYS[2], string.format('%d', token), 'EX', ARGV[3])
return token
""")

RELEASE_LEASE = _script("""
-- KEYS: lease. ARGV: owner. Returns 1 if the owner held it.
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
""")

WRITE_MANIFEST = _script(
    _LIVE
    + """
-- KEYS: manifest, fence, epoch. ARGV: fencing token, epoch, version that is replaced, new version, folded id, body,
-- seconds that manifest and epoch live at least.
-- Returns 'ok', or why it was refused: 'fenced' (a newer lease has been granted, or a newer holder has written),
-- 'epoch' (another data set), 'version' (the manifest is not the one that was read).
local token = tonumber(ARGV[1])
if redis.call('GET', KEYS[3]) ~= ARGV[2] then return 'epoch' end
if tonumber(redis.call('GET', KEYS[2]) or '0') ~= token then return 'fenced' end
local old = redis.call('HMGET', KEYS[1], 'version', 'token')
if token < tonumber(old[2] or '0') then return 'fenced' end
if (old[1] or '0') ~= ARGV[3] then return 'version' end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'version', ARGV[4], 'folded', ARGV[5], 'body', ARGV[6])
live(KEYS[3], ARGV[7], {KEYS[1]})
return 'ok'
"""
)

KEEP = _script(
    _LIVE
    + """
-- KEYS: epoch, then others of the namespace, 256 at most. ARGV: seconds that all of them live from now, at least.
-- Returns how many of the others are there.
return live(KEYS[1], ARGV[1], {unpack(KEYS, 2)})
"""
)

TRIM_LOG = _script("""
-- KEYS: log, manifest. ARGV: version of the manifest that allows it, first id to keep.
-- Returns the number of entries removed: none if the manifest has changed since.
if redis.call('HGET', KEYS[2], 'version') ~= ARGV[1] then return 0 end
return redis.call('XTRIM', KEYS[1], 'MINID', '=', ARGV[2])
""")

WRITE_SEGMENT = _script("""
-- KEYS: segment, fence, epoch. ARGV: fencing token, epoch, seconds that the segment lives, frame.
-- Returns 1, or 0 if a newer lease has been granted or the epoch is another: nothing returns after a purge.
if redis.call('GET', KEYS[3]) ~= ARGV[2] then return 0 end
if tonumber(redis.call('GET', KEYS[2]) or '0') ~= tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[4], 'EX', ARGV[3])
return 1
""")

SEIZE_LEASE = _script("""
-- KEYS: lease, fence, manifest. ARGV: owner, milliseconds of the lease, seconds that the fence lives.
-- Takes the lease from any holder. Returns its fencing token.
local written = tonumber(redis.call('HGET', KEYS[3], 'token') or '0')
local token = math.max(tonumber(redis.call('GET', KEYS[2]) or '0'), written)
if redis.call('GET', KEYS[1]) ~= ARGV[1] then token = token + 1 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[2], string.format('%d', token), 'EX', ARGV[3])
return token
""")

END_LEASE = _script("""
-- KEYS: lease, fence. ARGV: owner. Returns 1 if the owner held it; then the fence is gone too.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
""")

DROP_ALL = _script("""
-- KEYS: manifest, fence, epoch, log. ARGV: fencing token. Returns how many keys there were, or -1 if a newer lease has
-- been granted.
if tonumber(redis.call('GET', KEYS[2]) or '0') ~= tonumber(ARGV[1]) then return -1 end
return redis.call('DEL', KEYS[1], KEYS[3], KEYS[4])
""")

REPLACE_ALL = _script("""
-- KEYS: manifest, fence, epoch, log. ARGV: fencing token, epoch, version that is replaced, new version, last id of the
-- log whose entries the new manifest holds as segments, body, seconds that manifest and epoch live, new epoch.
-- Returns 'ok', or why it was refused, as WRITE_MANIFEST does.
local token = tonumber(ARGV[1])
if redis.call('GET', KEYS[3]) ~= ARGV[2] then return 'epoch' end
if tonumber(redis.call('GET', KEYS[2]) or '0') ~= token then return 'fenced' end
if (redis.call('HGET', KEYS[1], 'version') or '0') ~= ARGV[3] then return 'version' end
redis.call('SET', KEYS[3], ARGV[8], 'EX', ARGV[7])
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'version', ARGV[4], 'folded', '0-0', 'body', ARGV[6])
redis.call('EXPIRE', KEYS[1], ARGV[7])
redis.call('XTRIM', KEYS[4], 'MINID', '=', ARGV[5])
redis.call('XDEL', KEYS[4], ARGV[5])
return 'ok'
""")

APPEND_IN_EPOCH = _script(
    _LIVE
    + """
-- KEYS: log, epoch. ARGV: epoch that the entry is for, entry, entries that the log keeps, seconds that both live at
-- least.
-- Returns the entry's id, or an empty string if the data set is another one.
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return '' end
local id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', 'e', ARGV[2])
live(KEYS[2], ARGV[4], {KEYS[1]})
return id
"""
)

SUPPORT_PHRASES = _script("""
-- KEYS: opted out, offers of the tenant today, phrases, then the supporters of each phrase, 32 at most. ARGV: tenant,
-- time, seconds that support lasts, supporters needed, supporters kept, offers allowed, phrases kept, then their ids.
-- Returns for each phrase 1 if its tokens are wanted, 0 if not, -1 if the tenant has made too many offers; or only -2
-- if it has opted out, or opted in again at or after that time.
local since = redis.call('HGET', KEYS[1], ARGV[1])
if since and (since == 'never' or tonumber(ARGV[2]) <= tonumber(since)) then return {-2} end
local has_room = redis.call('HLEN', KEYS[3]) < tonumber(ARGV[7])
local answers = {}
for i = 4, math.min(#KEYS, 35) do
  local answer = -1
  local offers = redis.call('INCR', KEYS[2])
  if offers == 1 then redis.call('EXPIRE', KEYS[2], 172800) end
  if offers <= tonumber(ARGV[6]) then
    redis.call('ZADD', KEYS[i], 'GT', ARGV[2], ARGV[1])
    redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', string.format('(%.0f', tonumber(ARGV[2]) - tonumber(ARGV[3])))
    local surplus = redis.call('ZCARD', KEYS[i]) - tonumber(ARGV[5])
    if surplus > 0 then redis.call('ZREMRANGEBYRANK', KEYS[i], 0, surplus - 1) end
    redis.call('EXPIRE', KEYS[i], ARGV[3])
    answer = 0
    if has_room and redis.call('ZCARD', KEYS[i]) >= tonumber(ARGV[4])
       and redis.call('HEXISTS', KEYS[3], ARGV[i + 4]) == 0 then
      answer = 1
    end
  end
  answers[i - 3] = answer
end
return answers
""")

KEEP_PHRASE = _script("""
-- KEYS: phrases, supporters of this one. ARGV: id, frame, supporters needed, phrases kept, seconds that they live.
-- Returns 1 if it was written, 0 if it exists, there are too many phrases, or it has too little support by now.
if redis.call('ZCARD', KEYS[2]) < tonumber(ARGV[3]) then return 0 end
if redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then return 0 end
local written = redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[5])
return written
""")

RENEW_LEASES = _script("""
-- KEYS: the caller's last call, then buckets. ARGV: number of the call, milliseconds for which it is remembered,
-- seconds by which demand is forgotten, then for each bucket: amount that flows in a second, capacity, amount spent
-- since the last report, amount asked for since then, level if there is no bucket. What a call reports does not count
-- again, nor that of an earlier one. Returns the level of each bucket and the demand for it, as texts.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local told = {}
local counts = tonumber(ARGV[1]) > tonumber(redis.call('GET', KEYS[1]) or 0)
if counts then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
for i = 1, #KEYS - 1 do
  local key, rate, capacity = KEYS[i + 1], tonumber(ARGV[5 * i - 1]), tonumber(ARGV[5 * i])
  local spent, asked_now = tonumber(ARGV[5 * i + 1]), tonumber(ARGV[5 * i + 2])
  if not counts then spent, asked_now = 0, 0 end
  local old = redis.call('HMGET', key, 'level', 'asked', 'time')
  local passed = math.max(0, now - tonumber(old[3] or now))
  local level = math.min(capacity, tonumber(old[1] or ARGV[5 * i + 3]) + rate * passed) - spent
  local asked = tonumber(old[2] or 0) * math.exp(-passed / tonumber(ARGV[3])) + asked_now
  told[2 * i - 1], told[2 * i] = string.format('%.17g', level), string.format('%.17g', asked)
  redis.call('HSET', key, 'level', told[2 * i - 1], 'asked', told[2 * i], 'time', string.format('%.6f', now))
  redis.call('PEXPIRE', key, string.format('%.0f', 1000 * ((capacity - level) / rate + 60)))
end
return told
""")

RENEW_PLACES = _script("""
-- KEYS: the caller's last call, which also names the caller, then a hash for each tenant. ARGV: number of the call,
-- milliseconds for which it and the caller's places are remembered, seconds by which demand is forgotten, then for each
-- tenant: places of all callers, places that the caller keeps, places that it wants, sequences that have come. A call
-- that is repeated, or comes after a later one, changes nothing. Returns for each tenant the places that the caller
-- holds, those that nobody holds, and the demand as a text.
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local expires = now + tonumber(ARGV[2]) / 1000
local told = {}
local counts = tonumber(ARGV[1]) > tonumber(redis.call('GET', KEYS[1]) or 0)
if counts then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
for i = 1, #KEYS - 1 do
  local key, limit, kept = KEYS[i + 1], tonumber(ARGV[4 * i]), tonumber(ARGV[4 * i + 1])
  local old = redis.call('HMGET', key, 'asked', 'time', 'held', 'sweep', KEYS[1])
  local asked = tonumber(old[1] or 0) * math.exp(-math.max(0, now - tonumber(old[2] or now)) / tonumber(ARGV[3]))
  local all, sweep, own = tonumber(old[3] or 0), tonumber(old[4] or 0), old[5] or '0 0'
  if now >= sweep or not (sweep <= expires) then  -- until then nothing expires
    all, sweep, own = 0, expires, '0 0'
    local fields = redis.call('HGETALL', key)
    for j = 1, #fields, 2 do
      local name, places, at = fields[j], string.match(fields[j + 1], '^(%d+) (%S+)$')
      if places and now >= tonumber(at) then redis.call('HDEL', key, name)
      elseif places then
        all, sweep = all + tonumber(places), math.min(sweep, tonumber(at))
        if name == KEYS[1] then own = fields[j + 1] end
      end
    end
  end
  local noted = tonumber(string.match(own, '^%d+'))
  local others = all - noted
  local held = noted
  if counts then held = math.max(kept, math.min(tonumber(ARGV[4 * i + 2]), limit - others)) end
  asked = string.format('%.17g', asked + tonumber(ARGV[4 * i + 3]))
  if counts then
    if held > 0 then redis.call('HSET', key, KEYS[1], string.format('%d %.6f', held, expires))
    else redis.call('HDEL', key, KEYS[1]) end
    redis.call('HSET', key, 'asked', asked, 'time', string.format('%.6f', now), 'held', others + held,
               'sweep', string.format('%.6f', sweep))
    redis.call('PEXPIRE', key, ARGV[2])
  end
  told[3 * i - 2], told[3 * i - 1], told[3 * i] = held, math.max(0, limit - others - held), asked
end
return told
""")

SERVER_TIME = _script("""
-- KEYS: any of the namespace. Returns the server's Unix time in milliseconds, a clock that all processes share.
local now = redis.call('TIME')
return tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)
""")
