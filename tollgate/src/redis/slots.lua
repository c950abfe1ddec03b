
-- Slots: how many requests of a key each process has under way. The second part of library.lua, with whose names it works.
--
-- FCALL slots n KEYS[1..n] ARGV[1..n]
--
-- KEYS     who holds slots of a key: for each process its number (c8), how many it holds (I4), until when, in
--          microseconds (d), and the number of the claim that said so (d). A process of zeros holds none: it says until
--          when it counts that another was denied.
-- ARGV     for each key what a process claims, packed '<c8dI4I4I4I4d': its number; the number of the claim, greater than
--          that of any claim before; how many of its requests are under way; how many slots it wants to keep of those
--          that it has, at least as many; how many more it wants; how many there are; for how long, in microseconds.
-- Reply    one string: for each key a byte, how many slots the process has now and how many all others have, '<BI4I4'.
--          The byte is 1, or 3 if somebody was denied lately, so that nothing should be kept that is not in use. Or it is
--          only the byte 64: the key is not what was written to it.
--
-- A claim says how many there are, not how many more or less: one that is lost is made good by the next, and one that
-- comes late, behind a later one, changes nothing. What is under way is under way, whoever has the slots by now; all
-- else is granted only while the sum is at most what there is. The time is the server's own.

local HOLDER, HOLDER_SIZE = '<c8I4dd', 28
local DENIED = '\0\0\0\0\0\0\0\0'
-- For how long it counts that somebody was denied: longer than they are told to wait.
local DENIED_US = 1.5e6

local function claim(key, argument, at_us)
  local process, number, under_way, kept, more, most, hold = unpack('<c8dI4I4I4I4d', argument)
  local state = call('GET', key) or ''
  if #state % HOLDER_SIZE ~= 0 then
    error('not slots')
  end
  local others, mine, is_late, left, denied_until = 0, 0, false, {}, 0
  for at = 1, #state, HOLDER_SIZE do
    local its_process, count, ends, its_number = unpack(HOLDER, state, at)
    if its_process == DENIED then
      denied_until = min(ends, at_us + DENIED_US)
    elseif its_process == process then
      mine, is_late = ends > at_us and count or 0, its_number > number
    elseif ends > at_us then
      others = others + count
      -- The clock has stepped back: whoever is still there says so again before this is over.
      left[#left + 1] = pack(HOLDER, its_process, count, min(ends, at_us + hold), its_number)
    end
  end
  local kind = denied_until > at_us and 3 or 1
  if is_late then
    return pack('<BI4I4', kind, mine, others)
  end
  local has = max(under_way, min(kept, mine, most - others))
  local granted = max(min(more, most - others - has), 0)
  has = has + granted
  if has > 0 then
    left[#left + 1] = pack(HOLDER, process, has, at_us + hold, number)
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

redis.register_function('@slots@', claim_all)
