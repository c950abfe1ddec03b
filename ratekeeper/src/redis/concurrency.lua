
-- Concurrency limits: the number of permits that each process holds of a key. Second part of library.lua, whose
-- locals it uses.
--
-- FCALL concurrency n KEYS[1..n] ARGV[1..n]
--
-- KEYS     the holders of each key: for each process its id (c8), its permits (I4), their expiry in microseconds (d),
--          and the number of its last claim (d). A process id of zeros holds no permits: its expiry states until when a
--          recent denial counts.
-- ARGV     for each key the claim of a process, packed '<c8dI4I4I4I4d': its id; the number of the claim, greater than
--          in any earlier claim; its requests in flight; the permits it keeps of those it has, at least as many; the
--          permits to add; the concurrency limit; the hold time in microseconds.
-- Reply    one string: for each key a byte, the permits of this process and those of all others, '<BI4I4'. The byte
--          is 1, or 3 if a request was denied recently, so that unused permits should be released. If the key holds a
--          foreign value, the byte is 64 and nothing follows it.
--
-- A claim states absolute numbers, so a lost claim is repaired by the next, and a claim that arrives after a later
-- one changes nothing. Requests in flight are always counted, even above the limit; other permits are granted only
-- while the sum stays within the limit. The time is the server's.

local HOLDER, HOLDER_SIZE = '<c8I4dd', 28
local DENIED = '\0\0\0\0\0\0\0\0'
-- How long a denial counts as recent: longer than the retry_after that denied requests get.
local DENIED_US = 1.5e6

local function claim(key, argument, at_us)
  local process, number, in_flight, kept, more, limit, hold = unpack('<c8dI4I4I4I4d', argument)
  local state = call('GET', key) or ''
  if #state % HOLDER_SIZE ~= 0 then
    error('the key holds a foreign value')
  end
  local others, mine, is_late, left, denied_until = 0, 0, false, {}, 0
  -- If the clock stepped back, an expiry is cut to the hold time; a live process renews before that.
  local latest = at_us + hold
  for at = 1, #state, HOLDER_SIZE do
    local its_process, count, ends, its_number = unpack(HOLDER, state, at)
    if its_process == DENIED then
      denied_until = min(ends, at_us + DENIED_US)
    elseif its_process == process then
      mine, is_late = ends > at_us and count or 0, its_number > number
    elseif ends > at_us then
      others = others + count
      if ends > latest then
        left[#left + 1] = pack(HOLDER, its_process, count, latest, its_number)
      else
        left[#left + 1] = sub(state, at, at + HOLDER_SIZE - 1)
      end
    end
  end
  local kind = denied_until > at_us and 3 or 1
  if is_late then
    return pack('<BI4I4', kind, mine, others)
  end
  local has = max(in_flight, min(kept, mine, limit - others))
  local granted = max(min(more, limit - others - has), 0)
  has = has + granted
  if has > 0 then
    left[#left + 1] = pack(HOLDER, process, has, latest, number)
  end
  if #left > 0 then
    if granted < more then
      denied_until = at_us + DENIED_US
    end
    if denied_until > at_us then
      left[#left + 1] = pack(HOLDER, DENIED, 0, denied_until, 0)
    end
    call('SET', key, concat(left), 'PX', ceil(hold / 1000) + 1)
  elseif state ~= '' then
    call('UNLINK', key)
  end
  return pack('<BI4I4', kind, has, others)
end

local function claim_all(keys, arguments)
  if not call then
    bind()
  end
  local time = call('TIME')
  local at_us = time[1] * MICROS + time[2]
  local replies = {}
  for i = 1, #keys do
    local is_right, reply = pcall(claim, keys[i], arguments[i], at_us)
    replies[i] = is_right and reply or GARBLED
  end
  return concat(replies)
end

redis.register_function('@concurrency@', claim_all)
