
-- Records: what doors remember for a while, such as reservations. The third part of library.lua, with whose names it works.
--
-- FCALL records n KEYS[1..n] what ...
--
--   put, KEYS when and what, ARGV id, value, milliseconds, most   1, or 0 if there are so many already
--   take, KEYS when, what and gone, ARGV id                       the value, or an empty one if it is gone, or none
--   due, KEYS when, what and gone, ARGV most                      the values of those whose time has come
--   claim, KEYS name, ARGV asked, milliseconds                    what is there already, or none: then this is
--   answer, KEYS name, ARGV answer, milliseconds                  1, or none if the claim is over
--
-- `when` is a sorted set of ids by the millisecond at which their time comes, `what` their values. Both live a day longer
-- than the last of them: somebody must be there to see that the time of one has come. `gone`, with an id behind it, is there
-- for a while once the value was handed out, so that who asks again learns that. A claim is the length of what was asked, '<I4', what was
-- asked, and the answer once there is one.

local LONGER_MS = DAY * 1000
-- For how long it is known of a value that it is gone.
local GONE_MS = 3600 * 1000

-- Hands out a value: from now on it is gone.
local function handed_out(keys, id, value)
  call('HDEL', keys[2], id)
  call('ZREM', keys[1], id)
  call('SET', keys[3] .. id, '1', 'PX', GONE_MS)
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

function RECORDS.take(keys, arguments, now_ms)
  local id = arguments[2]
  local value = call('HGET', keys[2], id)
  if not value then
    return call('GET', keys[3] .. id) and { '' } or {}
  end
  -- One whose time has come is for those who ask what is due.
  if tonumber(call('ZSCORE', keys[1], id) or 0) <= now_ms then
    return { '' }
  end
  return { handed_out(keys, id, value) }
end

function RECORDS.due(keys, arguments, now_ms)
  local found = {}
  for _, id in ipairs(call('ZRANGE', keys[1], '-inf', now_ms, 'BYSCORE', 'LIMIT', '0', arguments[2])) do
    -- An id without a value was never put there by us.
    found[#found + 1] = handed_out(keys, id, call('HGET', keys[2], id) or '')
  end
  return found
end

function RECORDS.claim(keys, arguments)
  local value = call('GET', keys[1])
  if value then
    return { value }
  end
  call('SET', keys[1], pack('<I4', #arguments[2]) .. arguments[2], 'PX', arguments[3])
  return {}
end

function RECORDS.answer(keys, arguments)
  local value = call('GET', keys[1])
  if not value then
    return {}
  end
  call('SET', keys[1], sub(value, 1, 4 + unpack('<I4', value)) .. arguments[2], 'PX', arguments[3])
  return { '1' }
end

redis.register_function('@records@', function(keys, arguments)
  if not call then
    bind()
  end
  local time = call('TIME')
  return RECORDS[arguments[1]](keys, arguments, time[1] * 1000 + floor(time[2] / 1000))
end)
