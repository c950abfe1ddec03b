
-- Slots: how many requests of a key each process has under way. The second part of library.lua, with whose names it works.
--
-- FCALL slots n KEYS[1..n] ARGV[1..n]
--
-- KEYS     who holds slots of a key: for each process its number (c8), how many it holds (I4), until when, in
--          microseconds (d), and the number of the claim that said so (d).
-- ARGV     for each key what a process claims, packed '<c8dI4I4I4I4d': its number; the number of the claim, greater than
--          that of any claim before; how many of its requests are under way; how many slots it wants to keep of those
--          that it has, at least as many; how many more it wants; how many there are; for how long, in microseconds.
-- Reply    one string: for each key a byte, 1, how many slots the process has now and how many all others have, '<BI4I4'.
--          Or the byte 64: the key is not what was written to it.
--
-- A claim says how many there are, not how many more or less: one that is lost is made good by the next, and one that
-- comes late, behind a later one, changes nothing. What is under way is under way, whoever has the slots by now; all
-- else is granted only while the sum is at most what there is. The time is the server's own.

local HOLDER, HOLDER_SIZE = '<c8I4dd', 28

local function claim(key, argument, at_us)
  local process, number, under_way, kept, more, most, hold = unpack('<c8dI4I4I4I4d', argument)
  local state = call('GET', key) or ''
  if #state % HOLDER_SIZE ~= 0 then
    error('not slots')
  end
  local others, mine, is_late, left = 0, 0, false, {}
  for at = 1, #state, HOLDER_SIZE do
    local its_process, count, ends, its_number = unpack(HOLDER, state, at)
    if its_process == process then
      mine, is_late = ends > at_us and count or 0, its_number > number
    elseif ends > at_us then
      others = others + count
      -- The clock has stepped back: whoever is still there says so again before this is over.
      left[#left + 1] = pack(HOLDER, its_process, count, min(ends, at_us + hold), its_number)
    end
  end
  if is_late then
    return pack('<BI4I4', 1, mine, others)
  end
  local has = max(under_way, min(kept, mine))
  has = has + max(min(more, most - others - has), 0)
  if has > 0 then
    left[#left + 1] = pack(HOLDER, process, has, at_us + hold, number)
  end
  if #left > 0 then
    call('SET', key, concat(left), 'PX', ceil(hold / 1000) + 1)
  elseif state ~= '' then
    call('UNLINK', key)
  end
  return pack('<BI4I4', 1, has, others)
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
