
-- Records: short-lived state of the APIs, for example reservations. Third part of library.lua, whose locals it uses.
--
-- FCALL records n KEYS[1..n] command ...
--
--   put, KEYS when and what, ARGV id, value, milliseconds, most   1, or 0 if there are already `most` records
--   take, KEYS when, what and gone, ARGV id                       the value, an empty one if removed, or nothing
--   read, KEYS when, what and gone, ARGV id                       the same, and the record stays
--   due, KEYS when, what and gone, ARGV most                      the values that are due, at most `most`
--   claim, KEYS name, ARGV request, milliseconds                    the existing claim, or nothing if this one is first
--   answer, KEYS name, ARGV answer, milliseconds                  1, or nothing if the claim has expired
--
-- `when` is a sorted set of ids by due time in milliseconds; `what` is a hash of their values. Both live a day longer
-- than their last record, so that a process can still collect what is due. `gone` .. id exists for an hour after a
-- value was handed out, so that a second caller learns that it was removed. A claim is the length of `request`, '<I4',
-- then `request`, and then the answer once there is one.

local LONGER_MS = DAY * 1000
-- How long a removed id is remembered.
local GONE_MS = 3600 * 1000

-- Returns a value and marks its id as removed.
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

function RECORDS.read(keys, arguments, now_ms)
  local id = arguments[2]
  local value = call('HGET', keys[2], id)
  if not value then
    return call('GET', keys[3] .. id) and { '' } or {}
  end
  -- A record that is due is left to `due`.
  if tonumber(call('ZSCORE', keys[1], id) or 0) <= now_ms then
    return { '' }
  end
  return { value }
end

function RECORDS.take(keys, arguments, now_ms)
  local found = RECORDS.read(keys, arguments, now_ms)
  if found[1] and found[1] ~= '' then
    handed_out(keys, arguments[2], found[1])
  end
  return found
end

function RECORDS.due(keys, arguments, now_ms)
  local found = {}
  for _, id in ipairs(call('ZRANGE', keys[1], '-inf', now_ms, 'BYSCORE', 'LIMIT', '0', arguments[2])) do
    -- A missing value means that another program has written to the key.
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
