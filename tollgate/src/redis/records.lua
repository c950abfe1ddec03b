
-- Records: what doors remember for a while, such as reservations. The third part of library.lua, with whose names it works.
--
-- FCALL records n KEYS[1..n] what ...
--
--   put, KEYS when and what, ARGV id, value, milliseconds, most   1, or 0 if there are so many already
--   take, KEYS when and what, ARGV id                             the value, if there is one; it is gone then
--   due, KEYS when and what, ARGV most                            ids and values of those whose time has come; they are gone then
--   claim, KEYS name, ARGV value, milliseconds                    the value that is there already, or none: then this is
--   replace, KEYS name, ARGV value, milliseconds                  1
--
-- `when` is a sorted set of ids by the millisecond at which their time comes, `what` their values. Both live a day longer
-- than the last of them: somebody must be there to see that the time of one has come.

local LONGER_MS = DAY * 1000

local function taken(when, what, id)
  local value = call('HGET', what, id)
  call('HDEL', what, id)
  call('ZREM', when, id)
  return value
end

local RECORDS = {}

function RECORDS.put(keys, arguments, now_ms)
  local id, value, ms, most = arguments[2], arguments[3], tonumber(arguments[4]), tonumber(arguments[5])
  if call('ZCARD', keys[1]) >= most then
    return { '0' }
  end
  call('ZADD', keys[1], now_ms + ms, id)
  call('HSET', keys[2], id, value)
  for i = 1, 2 do
    if call('PTTL', keys[i]) < ms + LONGER_MS then
      call('PEXPIRE', keys[i], ms + LONGER_MS)
    end
  end
  return { '1' }
end

function RECORDS.take(keys, arguments)
  local value = taken(keys[1], keys[2], arguments[2])
  return value and { value } or {}
end

function RECORDS.due(keys, arguments, now_ms)
  local found = {}
  local ids = call('ZRANGE', keys[1], '-inf', now_ms, 'BYSCORE', 'LIMIT', '0', arguments[2])
  for _, id in ipairs(ids) do
    local value = taken(keys[1], keys[2], id)
    if value then
      found[#found + 1], found[#found + 2] = id, value
    end
  end
  return found
end

function RECORDS.claim(keys, arguments)
  local value = call('GET', keys[1])
  if value then
    return { value }
  end
  call('SET', keys[1], arguments[2], 'PX', arguments[3])
  return {}
end

function RECORDS.replace(keys, arguments)
  call('SET', keys[1], arguments[2], 'PX', arguments[3])
  return { '1' }
end

redis.register_function('@records@', function(keys, arguments)
  if not call then
    bind()
  end
  local time = call('TIME')
  return RECORDS[arguments[1]](keys, arguments, time[1] * 1000 + floor(time[2] / 1000))
end)
