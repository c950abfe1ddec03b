-- Tollgate's decisions inside Redis: one call decides any number of requests, each over one limit or several.
--
-- FCALL charge n KEYS[1..n] time ARGV[1..n]
--
-- KEYS     the states, one key for each charge.
-- time     empty: the server's own clock, which is the clock of production. Otherwise an instant, '<dI4', as below:
--          for tests and the simulator.
-- ARGV     for each key its charge, packed: kind (B), flags (B), cost (I4), limit (I4), and what the kind needs.
--          Flags: 1, the next charge belongs to the same request; 2, only look; 4, give back: the undoing of a charge
--          of this cost, made at an instant that is appended, '<dI4'. It is a request of its own. See `give back` below.
-- Reply    one string: the instant of the decisions ('<dI4'), then for each charge a byte (1 allowed, 2 decided, 4 a
--          state follows) and the state as it was before, from which the caller works out what to tell: its arithmetic
--          is that of the other stores. A log is too long for that; see `log` below.
--
-- Instants are seconds and nanoseconds since the epoch. Lua counts in doubles, so every whole number here stays below
-- 2^53; where a product would not, it is worked out in parts. Nothing is rounded.
--
-- Why one call: Redis runs it alone, so what it reads is still true when it writes. The charges of a request are all
-- asked first, and then all made or none. Requests are decided one after the other, so two of one key in one call do
-- not both get its last unit. A key expires when its state is as good as none, never before, and never has no expiry.

-- Redis lends its functions to a library when it is called, not while it is loaded.
local call, pack, unpack, floor, ceil, max, min, byte, char, sub, rep, find, concat

local function bind()
  call, pack, unpack, concat = redis.call, struct.pack, struct.unpack, table.concat
  floor, ceil, max, min = math.floor, math.ceil, math.max, math.min
  byte, char, sub, rep, find = string.byte, string.char, string.sub, string.rep, string.find
end

local SECOND = 1e9
local DAY, DAY_NS = 86400, 86400 * 1e9
local EXACT = 2 ^ 53
-- The longest expiry, in milliseconds: 285 thousand years.
local EXPIRY_MAX = 2 ^ 53
-- With an injected time keys live this much longer: the trace's time is not the server's.
local EXPIRY_EXTRA = DAY * 1000

-- The instant of the decisions, set by each call, and by how many milliseconds keys outlive their states.
local now_s, now_n, extra

local LOOK, GIVE_BACK = 2, 4
local ALLOWED, DECIDED, STATE = 1, 2, 4

-- Is instant a before instant b?
local function before(a_s, a_n, b_s, b_n)
  return a_s < b_s or (a_s == b_s and a_n < b_n)
end

local function add(a_s, a_n, b_s, b_n)
  local n = a_n + b_n
  if n >= SECOND then
    return a_s + b_s + 1, n - SECOND
  end
  return a_s + b_s, n
end

local function subtract(a_s, a_n, b_s, b_n)
  local n = a_n - b_n
  if n < 0 then
    return a_s - b_s - 1, n + SECOND
  end
  return a_s - b_s, n
end

-- k times a length, k below 2^44.
local function times(k, s, n)
  local k_high = floor(k / 4194304)
  local k_low = k - k_high * 4194304
  local high = n * k_high
  local carry = floor(high / SECOND)
  local low = (high - carry * SECOND) * 4194304 + n * k_low
  local low_s = floor(low / SECOND)
  return s * k + carry * 4194304 + low_s, low - low_s * SECOND
end

-- How many whole lengths w fit into a, and what is left.
local function divide(a_s, a_n, w_s, w_n)
  if w_n == 0 then
    local q = floor(a_s / w_s)
    return q, a_s - q * w_s, a_n
  end
  local q = floor((a_s * SECOND + a_n) / (w_s * SECOND + w_n))
  local r_s, r_n = subtract(a_s, a_n, times(q, w_s, w_n))
  while r_s < 0 do
    q = q - 1
    r_s, r_n = add(r_s, r_n, w_s, w_n)
  end
  while not before(r_s, r_n, w_s, w_n) do
    q = q + 1
    r_s, r_n = subtract(r_s, r_n, w_s, w_n)
  end
  return q, r_s, r_n
end

-- k (32 bits) times a length (up to 366 days) in three parts of base 10^9.
local function product(k, s, n)
  local k_high = floor(k / 65536)
  local k_low = k - k_high * 65536
  local a = n * k_high
  local a1 = floor(a / SECOND)
  local b = (a - a1 * SECOND) * 65536 + n * k_low
  local b1 = floor(b / SECOND)
  local c = s * k_high
  local c1 = floor(c / SECOND)
  local d = (c - c1 * SECOND) * 65536 + s * k_low + a1 * 65536 + b1
  local d1 = floor(d / SECOND)
  return c1 * 65536 + d1, d - d1 * SECOND, b - b1 * SECOND
end

-- Is j times a at most k times b?
local function product_at_most(j, a_s, a_n, k, b_s, b_n)
  local x2, x1, x0 = product(j, a_s, a_n)
  local y2, y1, y0 = product(k, b_s, b_n)
  if x2 ~= y2 then
    return x2 < y2
  end
  if x1 ~= y1 then
    return x1 < y1
  end
  return x0 <= y0
end

-- The share u / w of k, rounded down.
local function share(k, u_s, u_n, w_s, w_n)
  local u, w = u_s * SECOND + u_n, w_s * SECOND + w_n
  if k * w < EXACT then
    return floor(k * u / w)
  end
  local e = floor(k * (u / w))
  if not product_at_most(e, w_s, w_n, k, u_s, u_n) then
    return e - 1
  end
  if product_at_most(e + 1, w_s, w_n, k, u_s, u_n) then
    return e + 1
  end
  return e
end

-- How long a state lives that is as good as none after so long: whole milliseconds, rounded up.
local function expiry(ms)
  ms = max(ceil(ms), 0) + 1 + extra
  return ms < EXPIRY_MAX and ms or EXPIRY_MAX
end

-- Each kind of limit has a function
--
--   kind(key, charge, is_look) -> allowed, state, write, value, ms, is_changed
--
-- that reads the state and decides, but writes nothing. `state` is what the reply tells. `write(key, is_charged, value,
-- ms, is_changed)` then makes the change, and is nil where there is none. A state that is changed has been brought to
-- now, and is written even if the request is denied.

local function set(key, is_charged, value, ms, is_changed)
  if not value then
    call('UNLINK', key)
  elseif is_charged or is_changed then
    call('SET', key, value, 'PX', expiry(ms))
  end
end

-- Smooth token bucket and both leaky buckets.
-- Own part: capacity and cost as times, ticks per nanosecond: '<ddd ddd d'; a time is days, nanoseconds of the day and
-- ticks of the nanosecond, because the slowest bucket takes longer to fill than 2^53 s.
-- State: the instant at which the bucket is full again, '<ddd'.
local function bucket(key, charge)
  local _, _, cost, limit, f_d, f_t, f_f, c_d, c_t, c_f, ticks = unpack('<BBI4I4ddddddd', charge)
  local now_d = floor(now_s / DAY)
  local now_t = (now_s - now_d * DAY) * SECOND + now_n
  local state = call('GET', key)
  -- What is missing.
  local d, t, f = 0, 0, 0
  local is_moved = false
  if state then
    d, t, f = unpack('<ddd', state)
    d, t = d - now_d, t - now_t
    if t < 0 then
      d, t = d - 1, t + DAY_NS
    end
    if d < 0 then
      d, t, f = 0, 0, 0
    else
      -- More than twice a full bucket comes from a clock that was wrong: it counts as emptied just now.
      local two_f = f_f + f_f
      local carry = two_f >= ticks and 1 or 0
      local two_t = f_t + f_t + carry
      two_f = two_f - carry * ticks
      carry = two_t >= DAY_NS and 1 or 0
      local two_d = f_d + f_d + carry
      two_t = two_t - carry * DAY_NS
      if d > two_d or (d == two_d and (t > two_t or (t == two_t and f > two_f))) then
        d, t, f = f_d, f_t, f_f
        is_moved = true
      end
    end
  end
  local after_d, after_t, after_f = d + c_d, t + c_t, f + c_f
  if after_f >= ticks then
    after_f, after_t = after_f - ticks, after_t + 1
  end
  if after_t >= DAY_NS then
    after_t, after_d = after_t - DAY_NS, after_d + 1
  end
  local allowed = cost == 0
  if not allowed and cost <= limit then
    allowed = after_d < f_d or (after_d == f_d and (after_t < f_t or (after_t == f_t and after_f <= f_f)))
  end
  if allowed and cost > 0 then
    d, t, f = after_d, after_t, after_f
  elseif not is_moved then
    return allowed, state
  end
  local full_d, full_t = now_d + d, now_t + t
  if full_t >= DAY_NS then
    full_d, full_t = full_d + 1, full_t - DAY_NS
  end
  return allowed, state, set, pack('<ddd', full_d, full_t, f), d * DAY * 1000 + t / 1e6, is_moved
end

-- The same where a nanosecond is a tick and the bucket fills within 52 days, so that one number is enough for a time.
-- Own part: capacity and cost in nanoseconds: '<dd'. State: as above.
local function simple_bucket(key, charge)
  local _, _, cost, limit, fill, wanted = unpack('<BBI4I4dd', charge)
  local now_d = floor(now_s / DAY)
  local now_t = (now_s - now_d * DAY) * SECOND + now_n
  local state = call('GET', key)
  local missing = 0
  local is_moved = false
  if state then
    local d, t = unpack('<dd', state)
    -- Exact up to a hundred days, and beyond that far more than any full bucket.
    missing = (d - now_d) * DAY_NS + (t - now_t)
    if missing < 0 then
      missing = 0
    elseif missing > 2 * fill then
      missing, is_moved = fill, true
    end
  end
  local allowed = cost == 0 or (cost <= limit and missing + wanted <= fill)
  if allowed and cost > 0 then
    missing = missing + wanted
  elseif not is_moved then
    return allowed, state
  end
  local full_t = now_t + missing
  local days = floor(full_t / DAY_NS)
  return allowed, state, set, pack('<ddd', now_d + days, full_t - days * DAY_NS, 0), missing / 1e6, is_moved
end

-- Stepped token bucket.
-- Own part: tokens per period, the period: '<d dI4'. State: where the running period began, tokens missing: '<dI4I4'.
local function steps(key, charge)
  local _, _, cost, limit, count, p_s, p_n = unpack('<BBI4I4ddI4', charge)
  local state = call('GET', key)
  local s, n, used = now_s, now_n, 0
  local is_changed = false
  if state then
    s, n, used = unpack('<dI4I4', state)
    if before(now_s, now_n, s, n) then
      local w_s, w_n = times(ceil(limit / count), p_s, p_n)
      local behind_s, behind_n = subtract(s, n, now_s, now_n)
      if before(w_s, w_n, behind_s, behind_n) then
        s, n = now_s, now_n
        is_changed = true
      end
    else
      local e_s, e_n = subtract(now_s, now_n, s, n)
      local periods = divide(e_s, e_n, p_s, p_n)
      if periods >= ceil(used / count) then
        s, n, used = now_s, now_n, 0
      elseif periods > 0 then
        used = used - periods * count
        s, n = add(s, n, times(periods, p_s, p_n))
        is_changed = true
      end
    end
  end
  local allowed = cost <= limit - used
  if allowed and cost > 0 then
    used = used + cost
  elseif not is_changed then
    return allowed, state
  end
  local f_s, f_n = add(s, n, times(ceil(used / count), p_s, p_n))
  local ms = (f_s - now_s) * 1000 + (f_n - now_n) / 1e6
  return allowed, state, set, pack('<dI4I4', s, n, used), ms, is_changed
end

-- Fixed window.
-- Own part: the window, whether windows begin with the first request: '<dI4B'. State: where the window began, what was
-- taken in it: '<dI4I4'.
local function fixed_window(key, charge)
  local _, _, cost, limit, w_s, w_n, from_first = unpack('<BBI4I4dI4B', charge)
  local cur_s, cur_n = now_s, now_n
  if from_first == 0 then
    if w_n == 0 then
      cur_s, cur_n = now_s - now_s % w_s, 0
    else
      local _, r_s, r_n = divide(now_s, now_n, w_s, w_n)
      cur_s, cur_n = subtract(now_s, now_n, r_s, r_n)
    end
  end
  local state = call('GET', key)
  local s, n, count = cur_s, cur_n, 0
  local is_moved = false
  if state then
    s, n, count = unpack('<dI4I4', state)
    if s ~= cur_s or n ~= cur_n then
      local end_s, end_n = add(s, n, w_s, w_n)
      if not before(cur_s, cur_n, end_s, end_n) then
        s, n, count = cur_s, cur_n, 0
      else
        local far_s, far_n = add(cur_s, cur_n, w_s, w_n)
        if before(far_s, far_n, s, n) then
          s, n = cur_s, cur_n
          is_moved = true
        end
      end
    end
  end
  local allowed = cost <= limit - count
  if allowed and cost > 0 then
    count = count + cost
  elseif not is_moved then
    return allowed, state
  end
  local ms = (s - now_s + w_s) * 1000 + (n - now_n + w_n) / 1e6
  return allowed, state, set, pack('<dI4I4', s, n, count), ms, is_moved
end

-- The number of the window that an instant is in, that of its bucket in the window, and how much of the bucket has
-- passed, as a part of the window.
local function position(s, n, w_s, w_n, buckets)
  local q, r_s, r_n = divide(s, n, w_s, w_n)
  if buckets == 1 then
    return q, 0, r_s, r_n
  end
  local carry = floor(r_n * buckets / SECOND)
  return q, divide(r_s * buckets + carry, r_n * buckets - carry * SECOND, w_s, w_n)
end

-- Sliding window counter.
-- Own part: the window, how many buckets, the edge (0 weigh, 1 drop, 2 keep): '<dI4 I4 B'. State: the newest bucket,
-- as the number of its window and its number in that; what each bucket took, newest first, one more than the window
-- has: '<dI4' and '<I4' each.
local counter_of_many

local function counter(key, charge)
  local _, _, cost, limit, w_s, w_n, buckets, edge = unpack('<BBI4I4dI4I4B', charge)
  if buckets > 1 then
    return counter_of_many(key, charge)
  end
  -- The usual case, one bucket a window, with two numbers instead of a list.
  local q, r_s, r_n = divide(now_s, now_n, w_s, w_n)
  local state = call('GET', key)
  local newest, previous = 0, 0
  local is_changed = false
  if state then
    local q0, _, count, older = unpack('<dI4I4I4', state)
    if q0 == q then
      newest, previous = count, older
    elseif q0 == q - 1 then
      newest, previous, is_changed = 0, count, true
    elseif q0 < q then
      is_changed = true
    else
      -- The clock stepped back.
      return counter_of_many(key, charge)
    end
  end
  local used = newest
  if previous > 0 then
    if edge == 2 then
      used = used + previous
    elseif edge == 0 then
      local u_s, u_n = subtract(w_s, w_n, r_s, r_n)
      used = used + share(previous, u_s, u_n, w_s, w_n)
    end
  end
  local allowed = cost == 0 or used + cost <= limit
  if allowed and cost > 0 then
    newest = newest + cost
  elseif not is_changed then
    return allowed, state
  elseif newest == 0 and (previous == 0 or edge == 1) then
    return allowed, state, set
  end
  local leaves = q + (edge == 1 and 1 or 2)
  local ms = leaves * (w_s * 1000 + w_n / 1e6) - (now_s * 1000 + now_n / 1e6)
  return allowed, state, set, pack('<dI4I4I4', q, 0, newest, previous), ms, is_changed
end

counter_of_many = function(key, charge)
  local _, _, cost, limit, w_s, w_n, buckets, edge = unpack('<BBI4I4dI4I4B', charge)
  local q, b, p_s, p_n = position(now_s, now_n, w_s, w_n, buckets)
  local state = call('GET', key)
  local counts = {}
  local is_changed = false
  if state then
    local q0, b0 = unpack('<dI4', state)
    local shift = (q - q0) * buckets + (b - b0)
    if shift <= 0 then
      for i = 0, buckets do
        counts[i] = unpack('<I4', state, 13 + i * 4)
      end
      if shift < -buckets then
        -- From a clock that was wrong: carried to now. How much of the bucket at the edge counted is not known any
        -- more, and none of it may be given back.
        is_changed = true
        if edge == 0 then
          local both = counts[buckets - 1] + counts[buckets]
          counts[buckets - 1] = both < limit and both or limit
          counts[buckets] = 0
        end
      elseif shift < 0 then
        -- The clock stepped back: the key stays where it was until time has caught up.
        q, b, p_s, p_n = q0, b0, 0, 0
      end
    elseif shift <= buckets then
      is_changed = true
      for i = 0, shift - 1 do
        counts[i] = 0
      end
      for i = shift, buckets do
        counts[i] = unpack('<I4', state, 13 + (i - shift) * 4)
      end
    else
      is_changed = true
    end
  end
  if not counts[0] then
    for i = 0, buckets do
      counts[i] = 0
    end
  end
  local used = 0
  for i = 0, buckets - 1 do
    used = used + counts[i]
  end
  local at_edge = counts[buckets]
  -- Nothing is left that could count, not even if the clock stepped back.
  local is_gone = used == 0 and (at_edge == 0 or edge == 1)
  if edge == 2 then
    used = used + at_edge
  elseif edge == 0 and at_edge > 0 then
    local u_s, u_n = subtract(w_s, w_n, p_s, p_n)
    used = used + share(at_edge, u_s, u_n, w_s, w_n)
  end
  local allowed = cost == 0 or used + cost <= limit
  if allowed and cost > 0 then
    counts[0] = counts[0] + cost
  elseif not is_changed then
    return allowed, state
  elseif is_gone then
    return allowed, state, set
  end
  local value
  if buckets == 1 then
    value = pack('<dI4I4I4', q, b, counts[0], counts[1])
  else
    local parts = { pack('<dI4', q, b) }
    for i = 0, buckets do
      parts[i + 2] = pack('<I4', counts[i])
    end
    value = concat(parts)
  end
  -- Until the newest bucket has left the window. Doubles of milliseconds are good to a microsecond here.
  local leaves = q + 1 + (edge == 1 and b or b + 1) / buckets
  local ms = leaves * (w_s * 1000 + w_n / 1e6) - (now_s * 1000 + now_n / 1e6)
  return allowed, state, set, value, ms, is_changed
end

-- Sliding window log.
-- Own part: the window, whether denied requests are logged, too: '<dI4B'.
-- State: a head of 32 bytes, '<dI4 d I4I4I4': the newest instant, the cost of all entries, where in the ring the
-- oldest slot is, how many slots are used, how many there are; then the ring, 8 bytes a slot. An entry is a slot: its
-- nanoseconds and the low 32 bits of its second, '<I4I4'. If it costs more than 1, bit 30 of the nanoseconds is set and
-- a second slot holds the cost: its low 31 bits, with bit 31 set to tell it from an instant, and the rest.
-- Reply: the newest instant, the cost of all entries, and if denied the instant at which it would pass: '<dI4 d dI4'.
-- O(1) a decision: each entry is written once and dropped once, whatever the limit.
local HEAD = 32
local HEAD_FORMAT = '<dI4dI4I4I4'
-- Slots that are read at once.
local CHUNK = 128
local RING_MIN = 8
local IS_LONG = 2 ^ 30
local IS_COST = 2 ^ 31
local WORD = 2 ^ 32

local function slots(s, n, cost)
  if cost == 1 then
    return pack('<I4I4', n, s % WORD), 1
  end
  local high = floor(cost / IS_COST)
  return pack('<I4I4I4I4', n + IS_LONG, s % WORD, cost - high * IS_COST + IS_COST, high), 2
end

-- Both halves of a slot, from what has been read or from the next chunk.
local function slot(log, place)
  local at = HEAD + place * 8
  if at + 8 <= #log.text then
    return unpack('<I4I4', log.text, at + 1)
  end
  local from = log.chunk_at
  if not from or at < from or at + 8 > from + #log.chunk then
    from = at
    log.chunk_at, log.chunk = at, call('GETRANGE', log.key, at, at + CHUNK * 8 - 1)
  end
  return unpack('<I4I4', log.chunk, at - from + 1)
end

local function place(log, index)
  local at = log.first + index
  return at < log.ring and at or at - log.ring
end

-- The entry that begins with the slot of this index: its instant, its cost, and how many slots it has.
local function entry(log, index)
  local n, s = slot(log, place(log, index))
  s = log.s - (log.s - s) % WORD
  if n < IS_LONG then
    return s, n, 1, 1
  end
  local low, high = slot(log, place(log, index + 1))
  return s, n - IS_LONG, low - IS_COST + high * IS_COST, 2
end

-- The instant at which the oldest `units` have left the window, or that of an entry that comes after all of them.
local function leaves(log, units, s, n)
  local index = 0
  while index < log.slots do
    local e_s, e_n, cost, count = entry(log, index)
    units = units - cost
    if units <= 0 then
      return add(e_s, e_n, log.w_s, log.w_n)
    end
    index = index + count
  end
  return add(s, n, log.w_s, log.w_n)
end

-- Forgets the oldest units: with one more than the limit in the window every request is denied, however many more
-- there were, and they leave it first.
local function forget(log, surplus)
  while surplus > 0 and log.slots > 0 do
    local s, n, cost, count = entry(log, 0)
    if cost > surplus then
      -- What is left of the entry stands in the last of its slots.
      local text, kept = slots(s, n, cost - surplus)
      local at = place(log, count - kept)
      log.cuts = { { at, sub(text, 1, 8) } }
      if kept == 2 then
        log.cuts[2] = { place(log, 1), sub(text, 9) }
      end
      log.first, log.slots, log.units = at, log.slots - (count - kept), log.units - surplus
      return
    end
    log.first = place(log, count)
    log.slots, log.units, surplus = log.slots - count, log.units - cost, surplus - cost
  end
end

-- Puts 8 bytes into a slot of the whole text.
local function splice(text, place, bytes)
  local at = HEAD + place * 8
  return sub(text, 1, at) .. bytes .. sub(text, at + 9)
end

local function write_log(key, is_charged, log)
  local is_moved = log.moved ~= nil
  local added, count = '', 0
  if log.cost > 0 and (is_charged or log.counts_all) then
    local cost = log.cost
    if log.counts_all then
      cost = cost < log.limit + 1 and cost or log.limit + 1
      local surplus = log.units + cost - (log.limit + 1)
      if is_moved and surplus > 0 then
        log.moved, log.units = log.moved - surplus, log.units - surplus
      else
        forget(log, surplus)
      end
    end
    added, count = slots(log.at_s, log.at_n, cost)
    log.s, log.n, log.units = log.at_s, log.at_n, log.units + cost
  elseif log.is_cleared then
    call('UNLINK', key)
    return
  elseif not is_moved then
    if log.is_changed then
      call('SETRANGE', key, 0, pack(HEAD_FORMAT, log.s, log.n, log.units, log.first, log.slots, log.ring))
    end
    return
  end
  if is_moved and log.moved > 0 then
    -- One entry of all units, at now.
    local moved, moved_count = slots(now_s, now_n, log.moved)
    added, count = moved .. added, moved_count + count
  end
  local w_s, w_n = add(log.s, log.n, log.w_s, log.w_n)
  w_s, w_n = subtract(w_s, w_n, now_s, now_n)
  local ms = expiry(w_s * 1000 + w_n / 1e6)
  local used = log.slots + count
  local is_small = HEAD + log.ring * 8 == #log.text
  if used > log.ring then
    -- A larger ring, the oldest first.
    local ring = max(used, min(max(log.ring * 2, RING_MIN), log.limit + 1))
    local old = ''
    if log.slots > 0 then
      local text = is_small and log.text or call('GET', key)
      for _, cut in ipairs(log.cuts) do
        text = splice(text, cut[1], cut[2])
      end
      local from = HEAD + log.first * 8
      old = sub(text, from + 1, from + log.slots * 8)
      if #old < log.slots * 8 then
        old = old .. sub(text, HEAD + 1, HEAD + log.slots * 8 - #old)
      end
    end
    local head = pack(HEAD_FORMAT, log.s, log.n, log.units, 0, used, ring)
    call('SET', key, head .. old .. added .. rep('\0', (ring - used) * 8), 'PX', ms)
    return
  end
  local head = pack(HEAD_FORMAT, log.s, log.n, log.units, log.first, used, log.ring)
  if is_small then
    local text = log.text
    for _, cut in ipairs(log.cuts) do
      text = splice(text, cut[1], cut[2])
    end
    for i = 0, count - 1 do
      text = splice(text, place(log, log.slots + i), sub(added, i * 8 + 1, i * 8 + 8))
    end
    call('SET', key, head .. sub(text, HEAD + 1), 'PX', ms)
    return
  end
  for _, cut in ipairs(log.cuts) do
    call('SETRANGE', key, HEAD + cut[1] * 8, cut[2])
  end
  for i = 0, count - 1 do
    call('SETRANGE', key, HEAD + place(log, log.slots + i) * 8, sub(added, i * 8 + 1, i * 8 + 8))
  end
  call('SETRANGE', key, 0, head)
  call('PEXPIRE', key, ms)
end

-- The usual denial: the log is full, its oldest entry is still in the window, and when that leaves there is room.
local function quick_denial(text, cost, limit, w_s, w_n)
  local s, n, units, first = unpack(HEAD_FORMAT, text)
  local at = HEAD + first * 8
  local surplus = units + cost - limit
  if surplus <= 0 or cost > limit or at + 8 > #text or before(now_s, now_n, s, n) then
    return nil
  end
  local e_n, e_s = unpack('<I4I4', text, at + 1)
  if e_n >= IS_LONG or surplus > 1 then
    return nil
  end
  local pass_s, pass_n = add(s - (s - e_s) % WORD, e_n, w_s, w_n)
  if before(now_s, now_n, pass_s, pass_n) then
    return pack('<dI4ddI4', s, n, units, pass_s, pass_n)
  end
end

local function log(key, charge, is_look)
  local _, _, cost, limit, w_s, w_n, counts_all = unpack('<BBI4I4dI4B', charge)
  local text = call('GETRANGE', key, 0, HEAD + CHUNK * 8 - 1)
  if counts_all == 0 and text ~= '' then
    local denied = quick_denial(text, cost, limit, w_s, w_n)
    if denied then
      return false, denied
    end
  end
  local log = {
    key = key, text = text, w_s = w_s, w_n = w_n, cost = cost, limit = limit,
    counts_all = counts_all == 1 and not is_look,
    s = 0, n = 0, units = 0, first = 0, slots = 0, ring = 0, cuts = {},
  }
  local at_s, at_n = now_s, now_n
  if text ~= '' then
    log.s, log.n, log.units, log.first, log.slots, log.ring = unpack(HEAD_FORMAT, text)
    local far_s, far_n = add(now_s, now_n, w_s, w_n)
    if before(far_s, far_n, log.s, log.n) then
      log.moved = log.units
      log.s, log.n, log.first, log.slots, log.ring, log.text = now_s, now_n, 0, 0, 0, ''
    else
      if before(at_s, at_n, log.s, log.n) then
        at_s, at_n = log.s, log.n
      end
      local gone_s, gone_n = subtract(at_s, at_n, w_s, w_n)
      if not before(gone_s, gone_n, log.s, log.n) then
        log.s, log.n, log.units, log.first, log.slots, log.ring, log.text = 0, 0, 0, 0, 0, 0, ''
        log.is_cleared = true
      else
        while log.slots > 0 do
          local s, n, entry_cost, count = entry(log, 0)
          if before(gone_s, gone_n, s, n) then
            break
          end
          log.first = place(log, count)
          log.slots, log.units = log.slots - count, log.units - entry_cost
          log.is_changed = true
        end
      end
    end
  end
  log.at_s, log.at_n = at_s, at_n
  local allowed = log.units + cost <= limit
  if not allowed and cost <= limit then
    local units = log.units + cost - limit
    if log.counts_all then
      units = units + cost
    end
    log.pass_s, log.pass_n = leaves(log, units, at_s, at_n)
  end
  return allowed, log, write_log, log
end

local function told_log(log)
  return pack('<dI4ddI4', log.s, log.n, log.units, log.pass_s or 0, log.pass_n or 0)
end

-- Give back: a charge is undone, because the request was denied elsewhere.
--
--   give_back(key, charge, t_s, t_n), where t is the instant of the charge
--
-- The rule: never more than if the charge had not been made, on a clock that did not step back in between. Where that
-- is not known, too little is given back. A state that lies so far ahead that its clock was wrong gives nothing back,
-- and one that is gone has nothing to. Writing in place keeps the expiry, which may then be late but is not early.

-- A bucket with the charge lacks more than the same one without it would, at first by the cost. That comes down only
-- while the other is full, and then by a nanosecond in a nanosecond: the cost less the time since is still there.
local function give_back_to_bucket(key, charge, t_s, t_n)
  local _, _, _, _, f_d, f_t, f_f, c_d, c_t, c_f, ticks = unpack('<BBI4I4ddddddd', charge)
  local state = call('GET', key)
  if not state then
    return
  end
  local now_d = floor(now_s / DAY)
  local now_t = (now_s - now_d * DAY) * SECOND + now_n
  if before(t_s, t_n, now_s, now_n) then
    local e_s, e_n = subtract(now_s, now_n, t_s, t_n)
    local e_d = floor(e_s / DAY)
    c_d, c_t = c_d - e_d, c_t - ((e_s - e_d * DAY) * SECOND + e_n)
    if c_t < 0 then
      c_d, c_t = c_d - 1, c_t + DAY_NS
    end
    if c_d < 0 then
      return
    end
  end
  local full_d, full_t, full_f = unpack('<ddd', state)
  -- Twice a full bucket, as in `bucket`; a day more or less does not matter here.
  if full_d - now_d > 2 * f_d + 2 then
    return
  end
  full_d, full_t, full_f = full_d - c_d, full_t - c_t, full_f - c_f
  if full_f < 0 then
    full_t, full_f = full_t - 1, full_f + ticks
  end
  if full_t < 0 then
    full_d, full_t = full_d - 1, full_t + DAY_NS
  end
  if full_d < now_d or (full_d == now_d and (full_t < now_t or (full_t == now_t and full_f == 0))) then
    call('UNLINK', key)
  else
    call('SETRANGE', key, 0, pack('<ddd', full_d, full_t, full_f))
  end
end

local function give_back_to_simple_bucket(key, charge, t_s, t_n)
  local _, _, _, _, fill, cost = unpack('<BBI4I4dd', charge)
  local state = call('GET', key)
  if not state then
    return
  end
  local now_d = floor(now_s / DAY)
  local now_t = (now_s - now_d * DAY) * SECOND + now_n
  local d, t = unpack('<dd', state)
  local missing = (d - now_d) * DAY_NS + (t - now_t)
  local given = cost - max((now_s - t_s) * SECOND + (now_n - t_n), 0)
  if given <= 0 or missing > 2 * fill then
    return
  end
  missing = missing - given
  if missing <= 0 then
    call('UNLINK', key)
    return
  end
  local full_t = now_t + missing
  local days = floor(full_t / DAY_NS)
  call('SETRANGE', key, 0, pack('<ddd', now_d + days, full_t - days * DAY_NS, 0))
end

-- Within the period of the charge no token has arrived, so the cost is still missing. If the charge began the period,
-- whoever came after it would have begun a later one: then the period begins now.
local function give_back_to_steps(key, charge, t_s, t_n)
  local _, _, cost, limit, count, p_s, p_n = unpack('<BBI4I4ddI4', charge)
  local state = call('GET', key)
  if not state then
    return
  end
  local s, n, used = unpack('<dI4I4', state)
  if before(now_s, now_n, s, n) then
    local w_s, w_n = times(ceil(limit / count), p_s, p_n)
    local behind_s, behind_n = subtract(s, n, now_s, now_n)
    if before(w_s, w_n, behind_s, behind_n) then
      return
    end
  else
    local e_s, e_n = subtract(now_s, now_n, s, n)
    local periods = divide(e_s, e_n, p_s, p_n)
    if periods >= ceil(used / count) then
      return
    end
    used = used - periods * count
    s, n = add(s, n, times(periods, p_s, p_n))
  end
  if before(t_s, t_n, s, n) then
    return
  end
  used = used - cost
  if used <= 0 then
    call('UNLINK', key)
    return
  end
  if s == t_s and n == t_n and before(s, n, now_s, now_n) then
    s, n = now_s, now_n
  end
  local f_s, f_n = add(s, n, times(ceil(used / count), p_s, p_n))
  set(key, true, pack('<dI4I4', s, n, used), (f_s - now_s) * 1000 + (f_n - now_n) / 1e6)
end

-- Within the window of the charge its cost is part of the count. If the charge began the window, whoever came after it
-- would have begun a later one: then the window begins now.
local function give_back_to_fixed_window(key, charge, t_s, t_n)
  local _, _, cost, _, w_s, w_n, from_first = unpack('<BBI4I4dI4B', charge)
  local state = call('GET', key)
  if not state then
    return
  end
  local s, n, count = unpack('<dI4I4', state)
  local end_s, end_n = add(s, n, w_s, w_n)
  if before(t_s, t_n, s, n) or not before(t_s, t_n, end_s, end_n) or not before(now_s, now_n, end_s, end_n) then
    return
  end
  local far_s, far_n = add(now_s, now_n, w_s, w_n)
  if before(far_s, far_n, s, n) then
    return
  end
  count = count - cost
  if count <= 0 then
    call('UNLINK', key)
  elseif from_first == 1 and s == t_s and n == t_n and before(s, n, now_s, now_n) then
    set(key, true, pack('<dI4I4', now_s, now_n, count), w_s * 1000 + w_n / 1e6)
  else
    call('SETRANGE', key, 12, pack('<I4', count))
  end
end

-- The cost is part of what the bucket of its instant took, for as long as that bucket is held. (If the clock had
-- stepped back the cost went to a newer bucket, which leaves later: then this gives back less.)
local function give_back_to_counter(key, charge, t_s, t_n)
  local _, _, cost, _, w_s, w_n, buckets, edge = unpack('<BBI4I4dI4I4B', charge)
  local state = call('GET', key)
  if not state then
    return
  end
  local newest_q, newest_b = unpack('<dI4', state)
  local t_q, t_b = position(t_s, t_n, w_s, w_n, buckets)
  local index = (newest_q - t_q) * buckets + (newest_b - t_b)
  if index < 0 or index > buckets then
    return
  end
  local now_q, now_b = position(now_s, now_n, w_s, w_n, buckets)
  if (newest_q - now_q) * buckets + (newest_b - now_b) > buckets then
    return
  end
  local at = 12 + index * 4
  local count = pack('<I4', max(unpack('<I4', state, at + 1) - cost, 0))
  local left = find(sub(state, 1, at) .. count .. sub(state, at + 5), '[^%z]', 13)
  if not left or (edge == 1 and left > 12 + buckets * 4) then
    call('UNLINK', key)
  else
    call('SETRANGE', key, at, count)
  end
end

-- Slots of the ring from this index on, which may go round its end.
local function read_slots(log, index, count)
  local from = place(log, index)
  local text = call('GETRANGE', log.key, HEAD + from * 8, HEAD + min(from + count, log.ring) * 8 - 1)
  local rest = from + count - log.ring
  return rest > 0 and text .. call('GETRANGE', log.key, HEAD, HEAD + rest * 8 - 1) or text
end

local function write_slots(log, index, text)
  local from = place(log, index)
  local fits = (log.ring - from) * 8
  call('SETRANGE', log.key, HEAD + from * 8, sub(text, 1, fits))
  if fits < #text then
    call('SETRANGE', log.key, HEAD, sub(text, fits + 1))
  end
end

-- Entries, from the newest, among which a charge is looked for: it was made a moment ago.
local GIVE_BACK_ENTRIES = 64

-- The entry that ends before a slot of the tail: the slot that it begins with, its instant and its cost; nothing if the
-- tail does not hold it.
local function entry_before(log, tail, at)
  if at == 0 then
    return nil
  end
  local n, s = unpack('<I4I4', tail, at * 8 - 7)
  if n < IS_COST then
    return at - 1, log.s - (log.s - s) % WORD, n, 1
  end
  if at == 1 then
    return nil
  end
  local cost = n - IS_COST + s * IS_COST
  n, s = unpack('<I4I4', tail, at * 8 - 15)
  return at - 2, log.s - (log.s - s) % WORD, n - IS_LONG, cost
end

-- Takes the cost off an entry of that instant, and out of the log if nothing is left of it. If the clock had stepped
-- back before, and is still behind, the charge stands at the newest instant. A log that counts all keeps it.
local function give_back_to_log(key, charge, t_s, t_n)
  local _, _, cost, _, w_s, w_n, counts_all = unpack('<BBI4I4dI4B', charge)
  local head = call('GETRANGE', key, 0, HEAD - 1)
  if counts_all == 1 or head == '' then
    return
  end
  local log = { key = key }
  log.s, log.n, log.units, log.first, log.slots, log.ring = unpack(HEAD_FORMAT, head)
  local far_s, far_n = add(now_s, now_n, w_s, w_n)
  if before(far_s, far_n, log.s, log.n) then
    return
  end
  local is_behind = before(now_s, now_n, log.s, log.n) and not before(now_s, now_n, t_s, t_n)
  -- One more than is looked at: if the newest is taken out, that before it is the newest.
  local count = min(log.slots, 2 * (GIVE_BACK_ENTRIES + 1))
  local tail = read_slots(log, log.slots - count, count)
  local first, last, first_s, first_n, first_cost
  local at = count
  for _ = 1, GIVE_BACK_ENTRIES do
    local from, s, n, entry_cost = entry_before(log, tail, at)
    if not from or before(s, n, t_s, t_n) then
      break
    end
    if entry_cost >= cost then
      local is_it = s == t_s and n == t_n
      if is_it or (is_behind and not first and s == log.s and n == log.n) then
        first, last, first_s, first_n, first_cost = from, at, s, n, entry_cost
      end
      if is_it then
        break
      end
    end
    at = from
  end
  if not first then
    return
  end
  local kept, kept_count = '', 0
  if first_cost > cost then
    kept, kept_count = slots(first_s, first_n, first_cost - cost)
  elseif last == count then
    local _, s, n = entry_before(log, tail, first)
    log.s, log.n = s or 0, n or 0
  end
  local left = log.slots - (last - first) + kept_count
  local leaves_s, leaves_n = add(log.s, log.n, w_s, w_n)
  if left == 0 or not before(now_s, now_n, leaves_s, leaves_n) then
    call('UNLINK', key)
    return
  end
  local moved = kept .. sub(tail, last * 8 + 1)
  if moved ~= '' then
    write_slots(log, log.slots - count + first, moved)
  end
  call('SETRANGE', key, 0, pack(HEAD_FORMAT, log.s, log.n, log.units - cost, log.first, left, log.ring))
end

local KINDS = { bucket, steps, fixed_window, counter, log, simple_bucket }
local LOG = 5
local GIVE_BACKS = {
  give_back_to_bucket, give_back_to_steps, give_back_to_fixed_window, give_back_to_counter, give_back_to_log,
  give_back_to_simple_bucket,
}

-- What the reply says of a charge. A charge is decided if the limit has had its say, also if that was no.
local function told(kind, allowed, is_decided, state)
  local flags = (allowed and ALLOWED or 0) + (is_decided and DECIDED or 0)
  if not state then
    return char(flags)
  end
  -- A log's quick denial is told already: a text has no field `s`.
  if kind == LOG and state.s then
    state = told_log(state)
  end
  return char(flags + STATE) .. state
end

-- The most requests have one charge.
local function decide_one(key, charge)
  local kind, flags = byte(charge, 1, 2)
  if flags >= GIVE_BACK then
    GIVE_BACKS[kind](key, charge, unpack('<dI4', charge, #charge - 11))
    return char(DECIDED)
  end
  local is_look = flags >= LOOK
  local allowed, state, write, value, ms, is_changed = KINDS[kind](key, charge, is_look)
  if write and not is_look then
    write(key, allowed, value, ms, is_changed)
  end
  return told(kind, allowed, not is_look, state)
end

-- Decides the charges first to last of one request: all are asked, then all are made or none.
local function decide_several(keys, charges, first, last, replies)
  local asked = {}
  local all = true
  for i = first, last do
    local charge = charges[i + 1]
    local kind, flags = byte(charge, 1, 2)
    local is_look = flags >= LOOK
    asked[i] = { kind, is_look, KINDS[kind](keys[i], charge, is_look) }
    all = all and asked[i][3]
  end
  for i = first, last do
    local it = asked[i]
    local kind, is_look, allowed, state, write = it[1], it[2], it[3], it[4], it[5]
    -- A limit that denies decides for itself, and a log of all requests counts this one, too.
    local counts_all = kind == LOG and state.counts_all
    local is_decided = not is_look and (all or not allowed or counts_all)
    if is_decided and write then
      write(keys[i], all, it[6], it[7], it[8])
    end
    replies[i + 1] = told(kind, allowed, is_decided, state)
  end
end

local function charge(keys, arguments)
  if not call then
    bind()
  end
  if arguments[1] == '' then
    local time = call('TIME')
    now_s, now_n, extra = time[1] + 0, time[2] * 1000, 0
  else
    now_s, now_n = unpack('<dI4', arguments[1])
    extra = EXPIRY_EXTRA
  end
  local at = pack('<dI4', now_s, now_n)
  local count = #keys
  if count == 1 then
    return at .. decide_one(keys[1], arguments[2])
  end
  local replies = { at }
  local i = 1
  while i <= count do
    if byte(arguments[i + 1], 2) % 2 == 0 then
      replies[i + 1] = decide_one(keys[i], arguments[i + 1])
      i = i + 1
    else
      local last = i + 1
      while last < count and byte(arguments[last + 1], 2) % 2 == 1 do
        last = last + 1
      end
      decide_several(keys, arguments, i, last, replies)
      i = last + 1
    end
  end
  return concat(replies)
end

redis.register_function('@charge@', charge)
