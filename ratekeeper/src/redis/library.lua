-- Ratekeeper's decisions inside Redis: one call decides any number of requests, each over one or more limits.
--
-- FCALL charge n KEYS[1..n] ARGV[1..n] [time]
--
-- KEYS     the states, one key for each charge.
-- ARGV     for each key its charge, packed: kind (B), flags (B), cost (I4), limit (I4), and the parameters of the
--          kind. Flags: 1, the next charge belongs to the same request; 2, peek; 4, refund a charge of this cost,
--          made at an instant that is appended, '<dI4'. A refund is a separate request; see "Refunds" below.
-- time     absent in production: the server's clock decides. Otherwise an instant, '<dI4', for tests and the
--          simulator.
-- Reply    one string: the instant of the decisions in microseconds, '<d', or, if it is not a whole number of them,
--          -1 and '<dI4'. Then for each charge a byte (1 allowed, 2 decided, 4 a state follows, 8 the state is one
--          number, '<d'; 64 could not be decided) and the state before the charge, from which the caller computes the
--          decision with the arithmetic of the other stores. A log is too long for that; see "Sliding window log"
--          below.
--
-- Instants are seconds and nanoseconds since the epoch. Lua's numbers are doubles, so every whole number here stays
-- below 2^53; larger products are computed in parts. Nothing is rounded.
--
-- Redis runs a call atomically, so a state that was read is still current when it is written. All charges of a
-- request are decided first, and then all are made or none. Requests are decided one after the other, so two requests
-- for the same key in one call cannot both get its last unit. A key expires only after its state has no effect any
-- more, and every key has an expiry.

-- Redis provides its API and Lua's when a function is called, not while the library is loaded. Globals are slow,
-- because Redis guards them with a metatable.
local call, try, pack, unpack, floor, ceil, max, min, byte, char, sub, rep, find, format, concat
local type, pcall, ipairs, error

local function bind()
  type, pcall, ipairs, error = _G.type, _G.pcall, _G.ipairs, _G.error
  call, try, pack, unpack, concat = redis.call, redis.pcall, struct.pack, struct.unpack, table.concat
  floor, ceil, max, min = math.floor, math.ceil, math.max, math.min
  byte, char, sub, rep, find, format = string.byte, string.char, string.sub, string.rep, string.find, string.format
end

local SECOND = 1e9
local DAY, DAY_NS = 86400, 86400 * 1e9
local EXACT = 2 ^ 53
local WORD = 2 ^ 32
-- The longest expiry, in milliseconds: 285 thousand years.
local EXPIRY_MAX = 2 ^ 53
-- With an injected time keys live this much longer, because that time is not the server's.
local EXPIRY_EXTRA = DAY * 1000

-- The instant of the decisions, set by each call, and the milliseconds by which keys outlive their states.
local now_s, now_n, extra
-- The same in microseconds, if it is a whole number of them before the year 2106, as the server's time is.
local now_us

local PEEK, REFUND = 2, 4
local ALLOWED, DECIDED, STATE, NUMBER = 1, 2, 4, 8
local ALLOWED_AND_DECIDED, ALLOWED_AND_STATE, ALLOWED_AND_NUMBER = 3, 7, 11
local DENIED_AND_STATE, DENIED_AND_NUMBER = 6, 10
-- The reply to a charge that could not be decided: the key holds a foreign value.
local GARBLED = '\64'

-- Whether instant a is before instant b.
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

-- k times a duration, k below 2^44.
local function times(k, s, n)
  local k_high = floor(k / 4194304)
  local k_low = k - k_high * 4194304
  local high = n * k_high
  local carry = floor(high / SECOND)
  local low = (high - carry * SECOND) * 4194304 + n * k_low
  local low_s = floor(low / SECOND)
  return s * k + carry * 4194304 + low_s, low - low_s * SECOND
end

-- The number of whole durations w in a, and the remainder.
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

-- k (32 bits) times a duration (up to 366 days), as three digits of base 10^9.
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

-- Whether j times a is at most k times b.
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

-- k * u / w, rounded down.
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

-- The expiry of a state that has no effect after `ms`: whole milliseconds, rounded up. It is text, because Redis
-- formats a number with 17 digits, which takes twice as long.
local function expiry(ms)
  ms = max(ceil(ms), 0) + 1 + extra
  return format('%d', ms < EXPIRY_MAX and ms or EXPIRY_MAX)
end

-- Each kind of limit has a function, for example
--
--   token_bucket(key, charge) -> allowed, state, write, value, ms
--
-- It reads the state of a key and decides a charge, but writes nothing (except `extend_window`). `charge` is a charge
-- as parsed by `read`. `state` is the state for the reply. `write(key, value, ms, is_charged)` then makes the change,
-- and is nil if there is none. A state that has been advanced to now is written even if the request is denied.
--
-- Some kinds have a fast path for requests of one charge, the most common, at a time of whole microseconds, as the
-- server's is:
--
--   fast_token_bucket(charge) -> fast
--   fast(key) -> flags, state
--
-- A fast path decides the common case and writes. If it returns no flags, the case was another and nothing has changed.
-- It is a closure for each charge, because upvalues are read faster than fields.
--
-- Two kinds store their state as one whole number below 2^53, like Redis counters: INCRBY reads and charges in one
-- command, and a wrong charge is corrected afterwards.

-- Writes a state with an expiry after the time for which it counts.
local function put(key, value, ms)
  call('SET', key, value, 'PX', expiry(ms))
end

-- Overwrites the beginning of a state. The expiry is kept, because it is late enough.
local function patch(key, value)
  call('SETRANGE', key, '0', value)
end

-- Overwrites the count that follows the instant of a state. The expiry is kept: it depends on the instant, which has
-- not changed, and not on the count.
local function patch_count(key, count)
  call('SETRANGE', key, '12', pack('<I4', count))
end

local ZEROS = ('\0'):rep(64)

-- A text of zeros, made by doubling, because `rep` copies byte by byte.
local function zeros(count)
  local text = ZEROS
  while #text < count do
    text = text .. text
  end
  return sub(text, 1, count)
end

local function drop(key)
  call('UNLINK', key)
end

-- A state of this size, or nil: a limit of the same name but another kind may have used the key before.
local function of_size(state, size)
  return state and #state == size and byte(state) == 0 and state or nil
end

-- Whether a state is a number as INCRBY stores it. All other states begin with the low byte of a whole double, which
-- is 0.
local function is_number(state)
  return byte(state) ~= 0
end

-- Every number that is a state is below 2^53, which has 16 digits.
local DIGITS_MAX = 16

-- Like `of_size`, but also accepts a number.
local function number_or_of_size(state, size)
  if state and is_number(state) and #state > DIGITS_MAX then
    error('the key holds a foreign value')
  end
  return state and (is_number(state) or #state == size) and state or nil
end

-- Smooth token bucket and both leaky buckets.
-- Parameters: capacity and cost as times, ticks per nanosecond: '<ddd ddd d'. A time is days, nanoseconds of the day
-- and ticks of the nanosecond, because the slowest bucket takes longer than 2^53 s to fill. If a unit is a whole
-- number of microseconds: capacity and cost in microseconds, '<dd'.
-- State: the instant at which the bucket is full again, '<ddd'; or, if both the unit and the instant are whole
-- microseconds, that number of microseconds.
--
-- This instant moves with every charge, and the expiry would move with it. To save writes, time is divided into
-- grains: a key lives up to one grain longer than its state counts, and the expiry is written only when the instant
-- moves to another grain.
local MICROS, DAY_US = 1e6, 86400 * 1e6
-- A grain is about a second, or the time of four to eight units if that is longer, but at most 19 hours. It does not
-- depend on the capacity, because processes with different capacities rely on each other's expiries.
local GRAIN_US_MIN, GRAIN_US_MAX = 2 ^ 20, 2 ^ 36

local function grain_us(unit_us)
  local grain = GRAIN_US_MIN
  while grain < 4 * unit_us and grain < GRAIN_US_MAX do
    grain = grain * 2
  end
  return grain
end

-- A bucket that needs more than this many times its full refill time was written under a wrong clock: it counts as
-- emptied just now. A factor of 2 would suffice, and is used for an injected time and in the other stores. But the
-- state may come from a process with a higher capacity while the limit is being lowered, and then it must be kept.
local FAR, FAR_INJECTED = 16, 2

local function multiple(k, d, t, f, ticks)
  local carry = floor(f * k / ticks)
  t = t * k + carry
  local days = floor(t / DAY_NS)
  return { d = d * k + days, t = t - days * DAY_NS, f = f * k - carry * ticks }
end

-- A bucket whose parameters may differ from request to request keeps one instant per key, whatever they are. Its state
-- also has the scale of the last charge: '<ddddd', the instant, ticks per nanosecond, and the seconds of a full refill,
-- rounded up, by which a wrong clock is recognized.
local SECONDS_MAX = 2 ^ 32 - 1

-- Converts an instant to other ticks, rounded up.
local function rescale(d, t, f, from, ticks)
  if from == ticks then
    return d, t, f
  end
  f = ceil(f * ticks / from)
  if f >= ticks then
    f, t = 0, t + 1
    if t >= DAY_NS then
      d, t = d + 1, 0
    end
  end
  return d, t, f
end

-- Reads the state of a bucket in either format.
local function read_bucket(state)
  if is_number(state) then
    local us = state + 0
    local d = floor(us / DAY_US)
    return d, (us - d * DAY_US) * 1000, 0
  end
  return unpack('<ddd', state)
end

local function bucket_value(charge, d, t, f)
  if charge.fill_s then
    return pack('<ddddd', d, t, f, charge.ticks, charge.fill_s)
  end
  local us = d * DAY_US + t / 1000
  if charge.cost_us and t % 1000 == 0 and us < EXACT then
    return us
  end
  return pack('<ddd', d, t, f)
end

local function token_bucket(key, charge)
  local cost, limit, ticks = charge.cost, charge.limit, charge.ticks
  local f_d, f_t, f_f = charge.f_d, charge.f_t, charge.f_f
  local now_d = floor(now_s / DAY)
  local now_t = (now_s - now_d * DAY) * SECOND + now_n
  local state = call('GET', key)
  state = charge.fill_s and of_size(state, 40) or not charge.fill_s and number_or_of_size(state, 24) or nil
  -- The missing units, as a time.
  local d, t, f = 0, 0, 0
  local is_moved = false
  -- The grain that the expiry covers, if the state can be overwritten in place.
  local grain_d, grain
  if state then
    d, t, f = read_bucket(state)
    local written_fill_s
    if charge.fill_s then
      local _, _, _, from, fill_s = unpack('<ddddd', state)
      d, t, f = rescale(d, t, f, from, ticks)
      written_fill_s = fill_s
    elseif is_number(state) then
      state = pack('<ddd', d, t, f)
    else
      grain_d, grain = d, t - t % charge.grain
    end
    d, t = d - now_d, t - now_t
    if t < 0 then
      d, t = d - 1, t + DAY_NS
    end
    if d < 0 then
      d, t, f = 0, 0, 0
    elseif written_fill_s then
      local far_s = (extra == 0 and FAR or FAR_INJECTED) * written_fill_s
      if written_fill_s < SECONDS_MAX and d * DAY + (t + (f > 0 and 1 or 0)) / SECOND > far_s then
        d, t, f = f_d, f_t, f_f
        is_moved = true
      end
    else
      local far = extra == 0 and charge.far or charge.far_injected
      if d > far.d or (d == far.d and (t > far.t or (t == far.t and f > far.f))) then
        d, t, f = f_d, f_t, f_f
        is_moved = true
      end
    end
  end
  local after_d, after_t, after_f = d + charge.c_d, t + charge.c_t, f + charge.c_f
  if after_f >= ticks then
    after_f, after_t = after_f - ticks, after_t + 1
  end
  if after_t >= DAY_NS then
    after_t, after_d = after_t - DAY_NS, after_d + 1
  end
  -- By a charge with other parameters, an instant may be beyond the capacity.
  local allowed = cost == 0 and not charge.fill_s
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
  local value = bucket_value(charge, full_d, full_t, f)
  if grain_d == full_d and grain == full_t - full_t % charge.grain and type(value) == 'string' then
    return allowed, state, patch, value
  end
  return allowed, state, put, value, d * DAY * 1000 + (t + charge.grain) / 1e6
end

-- Corrects the charge of `fast_token_bucket` in all cases except an existing key with enough units.
local function correct_fast_charge(key, charge, before)
  local cost_us, fill, grain = charge.cost_us, charge.fill, charge.grain_us
  if before == 0 then
    -- The key did not exist.
    put(key, now_us + cost_us, (cost_us + grain) / 1000)
    return ALLOWED_AND_DECIDED
  elseif before < now_us then
    -- The bucket was full.
    local full = now_us + cost_us
    if full - full % grain == before - before % grain then
      call('INCRBY', key, now_us - before)
    else
      put(key, full, (cost_us + grain) / 1000)
    end
    return ALLOWED_AND_NUMBER, before
  end
  if before - now_us > (extra == 0 and FAR or FAR_INJECTED) * fill then
    -- Written under a wrong clock: counts as emptied just now.
    put(key, now_us + fill, (fill + grain) / 1000)
  else
    call('INCRBY', key, charge.refund_text)
  end
  return DENIED_AND_NUMBER, before
end

local function fast_token_bucket(charge)
  local cost_us, cost_us_text, fill, grain = charge.cost_us, charge.cost_us_text, charge.fill, charge.grain_us
  return function(key)
    local full = try('INCRBY', key, cost_us_text)
    if type(full) ~= 'number' then
      -- The state is in the other format, written by a request with an injected time.
      return nil
    end
    local before = full - cost_us
    if before < now_us or full > now_us + fill then
      return correct_fast_charge(key, charge, before)
    end
    if full % grain < cost_us then
      call('PEXPIRE', key, expiry((full - now_us + grain) / 1000))
    end
    return ALLOWED_AND_NUMBER, before
  end
end

-- Stepped token bucket.
-- Parameters: tokens per period, the period: '<d dI4'. State: the start of the current period, missing tokens:
-- '<dI4I4'.
local function stepped_token_bucket(key, charge)
  local cost, limit, count, p_s, p_n = charge.cost, charge.limit, charge.count, charge.p_s, charge.p_n
  local state = of_size(call('GET', key), 16)
  local s, n, used = now_s, now_n, 0
  -- The number of periods that the current expiry covers.
  local covered = 0
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
      covered = ceil(used / count)
      if periods >= covered then
        s, n, used, covered = now_s, now_n, 0, 0
      elseif periods > 0 then
        used = used - periods * count
        s, n = add(s, n, times(periods, p_s, p_n))
        is_changed = true
      end
    end
  end
  local allowed = cost == 0 or cost <= limit - used
  if allowed and cost > 0 then
    used = used + cost
  elseif not is_changed then
    return allowed, state
  end
  local periods = ceil(used / count)
  if not is_changed and periods <= covered then
    return allowed, state, patch_count, used
  end
  local f_s, f_n = add(s, n, times(periods, p_s, p_n))
  return allowed, state, put, pack('<dI4I4', s, n, used), (f_s - now_s) * 1000 + (f_n - now_n) / 1e6
end

-- Fixed window.
-- Parameters: the window, whether windows begin with the first request: '<dI4B'. State: the start of the window, the
-- units charged in it: '<dI4I4'. Limits below COUNTS / 2 with windows of whole seconds aligned to the clock, before
-- the year 2106, store one number: the start in seconds times COUNTS, plus the units charged.
--
-- The length of windows that begin with the first request may change while their states are in use, for example the
-- length of a ban. Their states also have the end of the window, '<dI4I4dI4': by the longest length that has seen the
-- state, on which the expiry depends.
local COUNTS = 2 ^ 21

-- Reads the state of a window in either format.
local function read_window(state)
  if is_number(state) then
    local count = state % COUNTS
    return (state - count) / COUNTS, 0, count
  end
  return unpack('<dI4I4', state)
end

-- Whether the window of a state is over, by the end that was written.
local function has_ended(state)
  local _, _, _, end_s, end_n = unpack('<dI4I4dI4', state)
  return not before(now_s, now_n, end_s, end_n)
end

-- Moves the end of a window and the expiry of its key if the window has become longer. Also for a peek: a ban is only
-- ever peeked at while it lasts.
local function extend_window(key, state, end_s, end_n)
  local _, _, _, until_s, until_n = unpack('<dI4I4dI4', state)
  if before(until_s, until_n, end_s, end_n) then
    call('SETRANGE', key, '16', pack('<dI4', end_s, end_n))
    call('PEXPIRE', key, expiry((end_s - now_s) * 1000 + (end_n - now_n) / 1e6))
  end
end

local function window_value(charge, s, n, count)
  if charge.from_first then
    return pack('<dI4I4dI4', s, n, count, add(s, n, charge.w_s, charge.w_n))
  end
  -- A count from when the limit was higher may need the other format.
  if charge.cost_text and s < WORD and count < COUNTS / 2 then
    return s * COUNTS + count
  end
  return pack('<dI4I4', s, n, count)
end

-- The state of a key; nil if there is none, or if its window began with the first request and is over.
local function window_state(key, charge)
  local state = call('GET', key)
  if not charge.from_first then
    return number_or_of_size(state, 16)
  end
  state = of_size(state, 28)
  return state and not has_ended(state) and state or nil
end

local function fixed_window(key, charge)
  local cost, w_s, w_n = charge.cost, charge.w_s, charge.w_n
  local cur_s, cur_n = now_s, now_n
  if not charge.from_first then
    if w_n == 0 then
      cur_s, cur_n = now_s - now_s % w_s, 0
    else
      local _, r_s, r_n = divide(now_s, now_n, w_s, w_n)
      cur_s, cur_n = subtract(now_s, now_n, r_s, r_n)
    end
  end
  local state = window_state(key, charge)
  local s, n, count = cur_s, cur_n, 0
  local is_moved, is_same = false, false
  if state then
    s, n, count = read_window(state)
    is_same = not is_number(state)
    if not is_same then
      state = pack('<dI4I4', s, n, count)
    end
    if s ~= cur_s or n ~= cur_n then
      local end_s, end_n = add(s, n, w_s, w_n)
      if not before(cur_s, cur_n, end_s, end_n) then
        s, n, count, is_same = cur_s, cur_n, 0, false
      else
        local far_s, far_n = add(cur_s, cur_n, w_s, w_n)
        if before(far_s, far_n, s, n) then
          s, n = cur_s, cur_n
          is_moved, is_same = true, false
        elseif charge.from_first then
          extend_window(key, state, end_s, end_n)
        end
      end
    end
    if charge.from_first then
      -- The caller needs no end.
      state = sub(state, 1, 16)
    end
  end
  local allowed = cost == 0 or cost <= charge.limit - count
  if allowed and cost > 0 then
    count = count + cost
  elseif not is_moved then
    return allowed, state
  end
  if is_same then
    return allowed, state, patch_count, count
  end
  return allowed, state, put, window_value(charge, s, n, count), (s - now_s + w_s) * 1000 + (n - now_n + w_n) / 1e6
end

local function fast_window(charge)
  local cost, limit, w_s, cost_text = charge.cost, charge.limit, charge.w_s, charge.cost_text
  local refund_text = charge.refund_text
  -- The last window: its start, its end, and the smallest and largest number after a charge that is allowed.
  local start, stop, after_min, after_max = 0, 0, 0, 0
  return function(key)
    if now_s >= stop or now_s < start then
      start = now_s - now_s % w_s
      stop, after_min, after_max = start + w_s, start * COUNTS + cost, start * COUNTS + limit
    end
    local after = try('INCRBY', key, cost_text)
    if type(after) ~= 'number' then
      return nil
    end
    if after > after_min and after <= after_max then
      return ALLOWED_AND_NUMBER, after - cost
    end
    local state = after - cost
    if state < start * COUNTS and state - state % COUNTS + w_s * COUNTS <= start * COUNTS then
      -- The key did not exist, or its window is over.
      put(key, after_min, (start - now_s + w_s) * 1000 - now_n / 1e6)
      if state == 0 then
        return ALLOWED_AND_DECIDED
      end
      return ALLOWED_AND_NUMBER, state
    end
    call('INCRBY', key, refund_text)
    if after > after_min and state - start * COUNTS < COUNTS then
      return DENIED_AND_NUMBER, state
    end
    return nil
  end
end

-- The number of the window of an instant, the number of its bucket in the window, and the elapsed time of the bucket,
-- scaled to the window.
local function position(s, n, w_s, w_n, buckets)
  local q, r_s, r_n = divide(s, n, w_s, w_n)
  if buckets == 1 then
    return q, 0, r_s, r_n
  end
  local carry = floor(r_n * buckets / SECOND)
  return q, divide(r_s * buckets + carry, r_n * buckets - carry * SECOND, w_s, w_n)
end

-- Sliding window counter.
-- Parameters: the window, the number of buckets, the edge policy (0 weigh, 1 drop, 2 keep): '<dI4 I4 B'. State: the
-- newest bucket as the number of its window and its number in the window, '<dI4'; then the units charged in each
-- bucket, newest first, one bucket more than the window has, '<I4' each.
local SUMMED_COUNTS = 16
local SUMMED_COUNTS_FORMAT = '<' .. ('I4'):rep(SUMMED_COUNTS)

local function sum_of_16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
  return a + b + c + d + e + f + g + h + i + j + k + l + m + n + o + p
end

-- The sum of `count` counts from a position. A counter may have a thousand, so they are not made a table.
local function sum_counts(text, at, count)
  local total = 0
  while count >= SUMMED_COUNTS do
    total = total + sum_of_16(unpack(SUMMED_COUNTS_FORMAT, text, at))
    at, count = at + SUMMED_COUNTS * 4, count - SUMMED_COUNTS
  end
  for i = at, at + count * 4 - 1, 4 do
    total = total + unpack('<I4', text, i)
  end
  return total
end

local function counter(key, charge)
  local cost, limit, buckets, edge = charge.cost, charge.limit, charge.buckets, charge.edge
  local w_s, w_n = charge.w_s, charge.w_n
  local q, b, p_s, p_n = position(now_s, now_n, w_s, w_n, buckets)
  local state = of_size(call('GET', key), 16 + buckets * 4)
  -- After the window has moved to now: the number of new buckets, and the counts of the others, as in the state.
  local new, counts = 0, nil
  local is_same, is_changed = false, false
  if state then
    counts = state
    local q0, b0 = unpack('<dI4', state)
    local shift = (q - q0) * buckets + (b - b0)
    if shift < -buckets then
      -- Written under a wrong clock: moved to now. The weight of the bucket at the edge is no longer known, so it
      -- counts fully and none of it becomes free early.
      is_changed = true
      if edge == 0 then
        local last, at_edge = unpack('<I4I4', state, 9 + buckets * 4)
        counts = sub(state, 1, 8 + buckets * 4) .. pack('<I4I4', min(last + at_edge, limit), 0)
      end
    elseif shift <= 0 then
      is_same = true
      if shift < 0 then
        -- The clock stepped back: the state stays as it is until time has caught up.
        q, b, p_s, p_n = q0, b0, 0, 0
      end
    else
      is_changed = true
      if shift <= buckets then
        new = shift
      else
        counts = nil
      end
    end
  end
  local used, at_edge, newest = 0, 0, 0
  if counts then
    used = sum_counts(counts, 13, buckets - new)
    at_edge = unpack('<I4', counts, 13 + (buckets - new) * 4)
    newest = new == 0 and unpack('<I4', counts, 13) or 0
  end
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
    newest = newest + cost
    if is_same then
      return allowed, state, patch_count, newest
    end
  elseif not is_changed then
    return allowed, state
  elseif is_gone then
    return allowed, state, drop
  end
  local value = pack('<dI4I4', q, b, newest)
  if not counts then
    value = value .. zeros(buckets * 4)
  elseif new == 0 then
    value = value .. sub(counts, 17)
  else
    value = value .. zeros(new * 4 - 4) .. sub(counts, 13, 16 + (buckets - new) * 4)
  end
  -- Until the newest bucket has left the window. Doubles of milliseconds are exact to a microsecond here.
  local leaves = q + 1 + (edge == 1 and b or b + 1) / buckets
  local ms = leaves * (w_s * 1000 + w_n / 1e6) - (now_s * 1000 + now_n / 1e6)
  return allowed, state, put, value, ms
end

-- The fast path for one bucket per window: two numbers instead of a list.
local function fast_counter(charge)
  local cost, limit, edge, w_s, w_n = charge.cost, charge.limit, charge.edge, charge.w_s, charge.w_n
  return function(key)
    local q, r_s, r_n
    if w_n == 0 then
      r_s, r_n = now_s % w_s, now_n
      q = (now_s - r_s) / w_s
    else
      q, r_s, r_n = divide(now_s, now_n, w_s, w_n)
    end
    local state = of_size(call('GET', key), 20)
    local newest, previous, is_same = 0, 0, false
    if state then
      local q0, _, count, older = unpack('<dI4I4I4', state)
      if q0 == q then
        newest, previous, is_same = count, older, true
      elseif q0 == q - 1 then
        previous = count
      elseif q0 > q then
        -- The clock stepped back.
        return nil
      end
    end
    local used = newest + cost
    if previous > 0 then
      if edge == 2 then
        used = used + previous
      elseif edge == 0 then
        local u_s, u_n = subtract(w_s, w_n, r_s, r_n)
        used = used + share(previous, u_s, u_n, w_s, w_n)
      end
    end
    if used > limit then
      if is_same then
        return DENIED_AND_STATE, state
      end
      return nil
    end
    if is_same then
      patch_count(key, newest + cost)
    else
      local leaves = q + (edge == 1 and 1 or 2)
      local ms = leaves * (w_s * 1000 + w_n / 1e6) - (now_s * 1000 + now_n / 1e6)
      put(key, pack('<dI4I4I4', q, 0, cost, previous), ms)
    end
    return state and ALLOWED_AND_STATE or ALLOWED_AND_DECIDED, state
  end
end

-- Sliding window log.
-- Parameters: the window, whether denied requests are logged too: '<dI4B'.
-- State: a head, then a ring of 8-byte words. An entry is one word: its nanoseconds and the low 32 bits of its
-- second, '<I4I4'. If it costs more than 1, bit 30 of the nanoseconds is set and a second word holds the cost: the
-- low 31 bits, with bit 31 set to distinguish it from an instant, and the rest.
-- The head: the newest instant, the cost of all entries, the ring index of the oldest word, the number of used words,
-- the ring size, '<dI4 d I4I4I4'; the number of words in the back and in the front, 'BB'; then those words. The back
-- contains the newest words that are not yet written to their index in the ring. The front is a copy of the oldest
-- words. So the common request reads and writes only the head, and accesses the ring once in a few requests.
-- Reply, '<dI4 d dI4': the newest instant, the cost of all entries, and, if denied, the instant at which it would be
-- allowed. Or one number: the cost of all entries, if the request was allowed and is the newest.
-- A ring that has to grow in the middle of its words is folded: nothing is moved, and newer words go behind its old
-- end. Its words are then, oldest first: from `first` to `fold` (the old end), from 0 to `jump` (where the old `first`
-- left no room), and from `fold`. The number of words in the front is then FOLDED, and fold and jump, '<I4I4', take the place of the words
-- in the head. When `first` has reached the words behind the fold, the ring is an ordinary one of its new size. It has
-- at most twice as many words as the limit has units, as the words before and behind the fold are each at most as many,
-- and the last growth.
-- A decision takes O(1) time if few entries have left the window, and O(log n) otherwise: the oldest entry that counts
-- is found by bisection. As long as no entry costs more than 2, units and words are the same number; otherwise the
-- costs of the dropped or of the remaining words are added up, whichever are fewer, and for a denial those of the words
-- that would have to leave. That takes 1 ms for 12,000 words.
local HEAD_FORMAT = '<dI4dI4I4I4BB'
local HEAD_AND_ENDS = HEAD_FORMAT .. 'c0c0'
-- The size of the head without its words.
local FIXED = 34
-- The offset of the numbers of those words.
local ENDS_AT = 32
local BACK, FRONT = 4, 4
local HEAD = FIXED + (BACK + FRONT) * 8
local HEAD_LAST = '' .. HEAD - 1
local FOLDED = 255
-- Words read with one command.
local CHUNK = 32
local RING_MIN = 4
local IS_LONG = 2 ^ 30
local IS_COST = 2 ^ 31
-- A key lives up to window / LOG_GRAIN longer than it counts, so that the expiry is written only this often.
local LOG_GRAIN = 8

local function words(s, n, cost)
  if cost == 1 then
    return pack('<I4I4', n, s % WORD), 1
  end
  local high = floor(cost / IS_COST)
  return pack('<I4I4I4I4', n + IS_LONG, s % WORD, cost - high * IS_COST + IS_COST, high), 2
end

-- Both halves of a word, from the text that has been read or from a new chunk.
local function word(log, index)
  local at = HEAD + index * 8
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

-- The index in the ring of the word at this index of the log.
local function word_index(log, index)
  local at, fold = log.first + index, log.fold
  if fold then
    if log.first >= log.jump then
      if at < fold then
        return at
      end
      at = at - fold
    end
    if at < log.jump then
      return at
    end
    at = at - log.jump + fold
  end
  return at < log.ring and at or at - log.ring
end

-- The end of the consecutive words from this index in the ring.
local function run_end(log, at)
  local fold = log.fold
  if not fold or at >= fold then
    return log.ring
  end
  return at < log.jump and log.jump or fold
end

-- The number of words for which there is room.
local function capacity(log)
  if not log.fold then
    return log.ring
  end
  return log.ring - log.first + log.jump - (log.first < log.jump and log.fold or 0)
end

-- Drops the oldest words.
local function drop_words(log, count)
  log.first, log.words = word_index(log, count), log.words - count
  if log.fold and log.first >= log.fold then
    log.fold = nil
  end
end

local function read_head(log, text)
  local _, front
  log.s, log.n, log.units, log.first, log.words, log.ring, _, front = unpack(HEAD_FORMAT, text)
  if front == FOLDED then
    log.fold, log.jump = unpack('<I4I4', text, FIXED + 1)
  end
end

local function write_head(log)
  local front = log.fold and FOLDED or 0
  local head = pack(HEAD_FORMAT, log.s, log.n, log.units, log.first, log.words, log.ring, 0, front)
  if log.fold then
    head = head .. pack('<I4I4', log.fold, log.jump)
  end
  call('SETRANGE', log.key, '0', head)
end

-- The entry that begins at this index: its instant, its cost and its number of words.
local function entry(log, index)
  local n, s = word(log, word_index(log, index))
  s = log.s - (log.s - s) % WORD
  if n < IS_LONG then
    return s, n, 1, 1
  end
  local low, high = word(log, word_index(log, index + 1))
  return s, n - IS_LONG, low - IS_COST + high * IS_COST, 2
end

-- Reads words from this index of the log.
local function read_words(log, index, count)
  local text = ''
  while count > 0 do
    local from = word_index(log, index)
    local some = min(count, run_end(log, from) - from)
    text = text .. call('GETRANGE', log.key, HEAD + from * 8, HEAD + (from + some) * 8 - 1)
    index, count = index + some, count - some
  end
  return text
end

-- Whether all entries cost 1 or 2: then an entry has as many words as units.
local function is_flat(log)
  return log.units == log.words
end

-- The index at which the entry of this word begins.
local function entry_start(log, index)
  local n = word(log, word_index(log, index))
  return n < IS_COST and index or index - 1
end

-- Words that are unpacked at once.
local SUMMED = 16
local SUMMED_FORMAT = '<' .. ('I4I4'):rep(SUMMED)

-- The cost of the entries in `count` words from this index, where an entry begins and ends.
local function sum(log, index, count)
  local units = 0
  while count > 0 do
    -- A few kilobytes at a time.
    local text = read_words(log, index, min(count, CHUNK * SUMMED))
    local read = #text / 8
    for at = 1, read, SUMMED do
      local some = min(SUMMED, read - at + 1)
      local format = some == SUMMED and SUMMED_FORMAT or '<' .. rep('I4I4', some)
      local halves = { unpack(format, text, at * 8 - 7) }
      for i = 1, some * 2, 2 do
        local low = halves[i]
        if low >= IS_COST then
          units = units + low - IS_COST + halves[i + 1] * IS_COST
        elseif low < IS_LONG then
          units = units + 1
        end
      end
    end
    index, count = index + read, count - read
  end
  return units
end

-- Drops the entries at or before the instant `gone`; the newest entry is after it. Returns whether there were any.
local function drop_gone(log, gone_s, gone_n)
  local low, high = 0, log.words
  -- Usually few have left the window: the range of the bisection doubles until it contains the end.
  local step = 1
  while low < high do
    local middle = min(low + step, high) - 1
    if step == 0 then
      middle = floor((low + high) / 2)
    end
    middle = entry_start(log, middle)
    local s, n, _, count = entry(log, middle)
    if before(gone_s, gone_n, s, n) then
      high, step = middle, 0
    else
      low, step = middle + count, step * 2
    end
  end
  if low == 0 then
    return false
  end
  if is_flat(log) then
    log.units = log.units - low
  elseif low <= log.words - low then
    log.units = log.units - sum(log, 0, low)
  else
    log.units = sum(log, low, log.words - low)
  end
  drop_words(log, low)
  return true
end

-- Sizes of the steps of `seek`, in words.
local STEPS = { CHUNK * SUMMED, CHUNK }

-- The oldest entry that, with all entries before it, costs at least `units`, of which there are as many: the index at
-- which it begins, and the cost of the entries before it.
local function seek(log, units)
  if is_flat(log) then
    local index = entry_start(log, units - 1)
    return index, index
  end
  local index, cost_before = 0, 0
  for _, step in ipairs(STEPS) do
    local rest = log.words - index
    while rest > step do
      local cost = sum(log, index, step)
      if cost_before + cost >= units then
        break
      end
      index, cost_before, rest = index + step, cost_before + cost, rest - step
    end
  end
  -- The step may have ended between the words of an entry, whose cost is in the second.
  index = entry_start(log, index)
  while true do
    local _, _, cost, count = entry(log, index)
    if cost_before + cost >= units then
      return index, cost_before
    end
    index, cost_before = index + count, cost_before + cost
  end
end

-- The instant at which the oldest `units` have left the window; an entry at (s, n) is assumed after all others.
local function leaves(log, units, s, n)
  if log.words > 0 and units <= log.units then
    s, n = entry(log, (seek(log, units)))
  end
  return add(s, n, log.w_s, log.w_n)
end

-- Drops the oldest units: one unit above the limit denies every request, so units beyond that have no effect, and the
-- oldest leave the window first.
local function expire(log, surplus)
  if surplus <= 0 then
    return
  elseif surplus >= log.units then
    drop_words(log, log.words)
    log.units = 0
    return
  end
  -- The first entry that is kept, at least in part.
  local index, dropped = seek(log, surplus + 1)
  local s, n, cost, count = entry(log, index)
  log.units = log.units - surplus
  if dropped < surplus then
    -- The remainder of the entry is stored in the last of its words.
    local text, kept = words(s, n, cost - (surplus - dropped))
    index = index + count - kept
    log.cuts = { { word_index(log, index), sub(text, 1, 8) } }
    if kept == 2 then
      log.cuts[2] = { word_index(log, index + 1), sub(text, 9) }
    end
  end
  drop_words(log, index)
end

local function write_words(log, index, text)
  while text ~= '' do
    local from = word_index(log, index)
    local some = run_end(log, from) - from
    call('SETRANGE', log.key, HEAD + from * 8, sub(text, 1, some * 8))
    index, text = index + some, sub(text, some * 8 + 1)
  end
end

-- Reads the beginning of a log after moving the back into the ring, which is not folded then. The move does not change the contents, so it is
-- also done for a peek.
local function open_log(key, last)
  local text = call('GETRANGE', key, 0, last)
  if text == '' then
    return text
  end
  local _, _, _, first, words, ring, back = unpack(HEAD_FORMAT, text)
  if back == 0 then
    return text
  end
  write_words({ key = key, first = first, ring = ring }, words - back, sub(text, FIXED + 1, FIXED + back * 8))
  call('SETRANGE', key, ENDS_AT, '\0\0')
  return call('GETRANGE', key, 0, last)
end

-- Milliseconds until the log has left the window and its grain is over.
local function log_ms(charge, s, n)
  return (s - now_s + charge.w_s) * 1000 + (n - now_n + charge.w_n) / 1e6 + charge.grain_ms
end

-- Renews the expiry if the newest instant has moved to another grain.
local function extend_log(key, charge, old_s, old_n, s, n)
  local old_ms, ms = old_s * 1000 + old_n / 1e6, s * 1000 + n / 1e6
  if ms - ms % charge.grain_ms ~= old_ms - old_ms % charge.grain_ms then
    call('PEXPIRE', key, expiry(log_ms(charge, s, n)))
  end
end

-- Rings up to this size are copied when they grow, so that Redis allocates exactly their size. Larger ones grow in
-- place by at most this many words, and at most this many are moved. Redis then allocates up to 1 MB more than they
-- need. Growth takes 0.1 ms, but when an allocation has no room left, Redis copies the value, which takes 3 ms for 10^6
-- words and 14 ms for 4 * 10^6: with jemalloc, four times per doubling.
local COPIED_MAX = 2 ^ 14
-- Words that are moved with one command.
local MOVED = 4096

-- Moves words within the ring by their indexes, which may overlap.
local function move_words(key, from, to, count)
  local at, step = 0, MOVED
  if to > from then
    at, step = floor((count - 1) / MOVED) * MOVED, -MOVED
  end
  while at >= 0 and at < count do
    local text = call('GETRANGE', key, HEAD + (from + at) * 8, HEAD + (from + min(at + MOVED, count)) * 8 - 1)
    call('SETRANGE', key, HEAD + (to + at) * 8, text)
    at = at + step
  end
end

-- Enlarges the ring in place. If it wraps around and one of its parts is short, that is moved: the newer words, before
-- the oldest, to behind the end, or the older ones to the new end. If both are long, it is folded.
local function grow_in_place(log, larger)
  local key, first, ring = log.key, log.first, log.ring
  local added = larger - ring
  call('SETRANGE', key, HEAD + larger * 8 - 1, '\0')
  log.ring = larger
  local newer, older = first + log.words - ring, ring - first
  if log.fold or newer <= 0 then
    return
  elseif newer <= added then
    move_words(key, 0, ring, newer)
  elseif older <= COPIED_MAX then
    move_words(key, first, first + added, older)
    log.first = first + added
  else
    log.fold, log.jump = ring, newer
  end
end

local function write_log(key, log, _, is_charged)
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
        expire(log, surplus)
      end
    end
    added, count = words(log.at_s, log.at_n, cost)
    log.s, log.n, log.units = log.at_s, log.at_n, log.units + cost
  elseif log.is_cleared then
    call('UNLINK', key)
    return
  elseif not is_moved then
    if log.is_changed then
      write_head(log)
    end
    return
  end
  if is_moved and log.moved > 0 then
    -- One entry of all units, at the current instant.
    local moved, moved_count = words(now_s, now_n, log.moved)
    added, count = moved .. added, moved_count + count
  end
  local used = log.words + count
  for _, cut in ipairs(log.cuts) do
    call('SETRANGE', key, HEAD + cut[1] * 8, cut[2])
  end
  if used > capacity(log) then
    local larger = log.ring + COPIED_MAX
    if not log.fold then
      larger = max(used, min(max(log.ring * 2, RING_MIN), larger, log.charge.words_max))
    end
    if larger <= COPIED_MAX then
      -- The oldest word comes first.
      local old = log.words > 0 and read_words(log, 0, log.words) or ''
      local head = pack(HEAD_FORMAT, log.s, log.n, log.units, 0, used, larger, 0, 0) .. zeros(HEAD - FIXED)
      put(key, head .. old .. added .. zeros((larger - used) * 8), log_ms(log.charge, log.s, log.n))
      return
    end
    grow_in_place(log, larger)
  end
  if count > 0 then
    write_words(log, log.words, added)
  end
  log.words = used
  write_head(log)
  extend_log(key, log.charge, log.old_s, log.old_n, log.s, log.n)
end

local function log(key, charge)
  local cost, limit, w_s, w_n = charge.cost, charge.limit, charge.w_s, charge.w_n
  local text = open_log(key, HEAD + CHUNK * 8 - 1)
  local log = {
    charge = charge, key = key, text = text, w_s = w_s, w_n = w_n, cost = cost, limit = limit,
    counts_all = charge.counts_all and not charge.is_peek,
    s = 0, n = 0, units = 0, first = 0, words = 0, ring = 0, cuts = {},
  }
  local at_s, at_n = now_s, now_n
  if text ~= '' then
    read_head(log, text)
    log.old_s, log.old_n = log.s, log.n
    local far_s, far_n = add(now_s, now_n, w_s, w_n)
    if before(far_s, far_n, log.s, log.n) then
      log.moved = log.units
      log.s, log.n, log.first, log.words, log.ring, log.text = now_s, now_n, 0, 0, 0, ''
      log.fold = nil
    else
      if before(at_s, at_n, log.s, log.n) then
        at_s, at_n = log.s, log.n
      end
      local gone_s, gone_n = subtract(at_s, at_n, w_s, w_n)
      if not before(gone_s, gone_n, log.s, log.n) then
        log.s, log.n, log.units, log.first, log.words, log.ring, log.text = 0, 0, 0, 0, 0, 0, ''
        log.is_cleared, log.fold = true, nil
      else
        log.is_changed = drop_gone(log, gone_s, gone_n)
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

local function encode_log(log)
  return pack('<dI4ddI4', log.s, log.n, log.units, log.pass_s or 0, log.pass_n or 0)
end

-- Creates a log with one entry.
local function begin_log(key, charge)
  local head = pack(HEAD_FORMAT, now_s, now_n, 1, 0, 1, charge.ring_min, 1, 0)
  put(key, head .. pack('<I4I4', now_n, now_s % WORD) .. charge.padding, log_ms(charge, now_s, now_n))
  return ALLOWED_AND_NUMBER, 1
end

-- Entries that the fast path drops. If more have left the window, they are found by bisection.
local FAST_DROPS = 32

-- The fast path: the request and all entries it reads cost 1.
local function fast_log(charge)
  local limit, w_s, w_n = charge.limit, charge.w_s, charge.w_n
  return function(key)
    local text = call('GETRANGE', key, '0', HEAD_LAST)
    if text == '' then
      return begin_log(key, charge)
    end
    local s, n, units, first, words, ring, back, front = unpack(HEAD_FORMAT, text)
    if now_s < s or (now_s == s and now_n < n) or front == FOLDED then
      return nil
    end
    local gone_s, gone_n = now_s - w_s, now_n - w_n
    if gone_n < 0 then
      gone_s, gone_n = gone_s - 1, gone_n + SECOND
    end
    if gone_s > s or (gone_s == s and gone_n >= n) then
      return begin_log(key, charge)
    end
    -- Drops entries that have left the window; the newest has not. The oldest words are in `from`, between `at` and
    -- `last`.
    local from, at, last = text, FIXED + back * 8, FIXED + (back + front) * 8
    local in_ring = words - back
    local dropped = 0
    local e_s, e_n
    while true do
      if at == last then
        if dropped < in_ring then
          local oldest = (first + dropped) % ring
          local count = min(FRONT, in_ring - dropped, ring - oldest)
          from = call('GETRANGE', key, HEAD + oldest * 8, HEAD + (oldest + count) * 8 - 1)
          at, last = 0, count * 8
        else
          from, at, last = text, FIXED + (dropped - in_ring) * 8, FIXED + back * 8
        end
      end
      e_n, e_s = unpack('<I4I4', from, at + 1)
      if e_n >= IS_LONG then
        return nil
      end
      e_s = s - (s - e_s) % WORD
      if gone_s < e_s or (gone_s == e_s and gone_n < e_n) then
        break
      end
      at, dropped = at + 8, dropped + 1
      if dropped > FAST_DROPS then
        return nil
      end
    end
    if units - dropped >= limit then
      if units > limit or dropped > 0 then
        return nil
      end
      if from ~= text then
        -- Caches the oldest words in the head, so that the next request need not read the ring.
        local ends = sub(text, FIXED + 1, FIXED + back * 8) .. from
        call('SETRANGE', key, ENDS_AT, pack('<BBc0', back, #from / 8, ends))
      end
      e_s, e_n = add(e_s, e_n, w_s, w_n)
      return DENIED_AND_STATE, pack('<dI4ddI4', s, n, units, e_s, e_n)
    end
    words = words - dropped + 1
    if words > ring then
      return nil
    end
    first = (first + dropped) % ring
    units = units - dropped + 1
    local oldest = sub(from, at + 1, last)
    local gone_of_back = dropped > in_ring and dropped - in_ring or 0
    local newest = sub(text, FIXED + 1 + gone_of_back * 8, FIXED + back * 8) .. pack('<I4I4', now_n, now_s % WORD)
    back = back - gone_of_back + 1
    if back == BACK then
      write_words({ key = key, first = first, ring = ring }, words - back, newest)
      back, newest = 0, ''
    end
    local front_count = (last - at) / 8
    call('SETRANGE', key, '0', pack(
      HEAD_AND_ENDS, now_s, now_n, units, first, words, ring, back, front_count, newest, oldest
    ))
    extend_log(key, charge, s, n, now_s, now_n)
    return ALLOWED_AND_NUMBER, units
  end
end

-- Refunds: a charge is undone because the request was denied elsewhere or cost less than estimated.
--
--   refund_token_bucket(key, charge, t_s, t_n), where t is the instant of the charge; below 0 if it is unknown
--
-- The rule: a key never has more budget than without the charge, on a clock that did not step back in between, except
-- that a window or period that the charge began stays where it is. If the exact amount is unknown, less is refunded.
-- A state so far ahead that its clock must have been wrong is not refunded, and an expired state needs no refund. If
-- the instant is unknown, the oldest units that count are refunded: whichever charge it was, no newer unit leaves
-- before its time. Overwriting in place keeps the expiry, which may then be late but never early.

-- Compared with a bucket without the charge, this one lacks up to the cost more. The difference shrinks only while
-- the other bucket is full, and then by a nanosecond per nanosecond: the cost minus the elapsed time is still
-- refundable.
local function refund_token_bucket(key, charge, t_s, t_n)
  local c_d, c_t, c_f = charge.c_d, charge.c_t, charge.c_f
  local state = number_or_of_size(call('GET', key), 24)
  if not state then
    return
  end
  local now_d = floor(now_s / DAY)
  local now_t = (now_s - now_d * DAY) * SECOND + now_n
  if t_s >= 0 and before(t_s, t_n, now_s, now_n) then
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
  local full_d, full_t, full_f = read_bucket(state)
  -- Written under a wrong clock, as in `token_bucket`; precision of a day is enough here.
  if full_d - now_d > (extra == 0 and FAR or FAR_INJECTED) * (charge.f_d + 1) then
    return
  end
  full_d, full_t, full_f = full_d - c_d, full_t - c_t, full_f - c_f
  if full_f < 0 then
    full_t, full_f = full_t - 1, full_f + charge.ticks
  end
  if full_t < 0 then
    full_d, full_t = full_d - 1, full_t + DAY_NS
  end
  if full_d < now_d or (full_d == now_d and (full_t < now_t or (full_t == now_t and full_f == 0))) then
    call('UNLINK', key)
  else
    call('SET', key, bucket_value(charge, full_d, full_t, full_f), 'KEEPTTL')
  end
end

-- Within the period of the charge no token has been added, so the full cost is refundable. The period keeps its
-- start, even if the refunded charge began it.
local function refund_stepped_token_bucket(key, charge, t_s, t_n)
  local cost, limit, count, p_s, p_n = charge.cost, charge.limit, charge.count, charge.p_s, charge.p_n
  local state = of_size(call('GET', key), 16)
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
  if t_s >= 0 and before(t_s, t_n, s, n) then
    return
  end
  used = used - cost
  if used <= 0 then
    call('UNLINK', key)
    return
  end
  local f_s, f_n = add(s, n, times(ceil(used / count), p_s, p_n))
  put(key, pack('<dI4I4', s, n, used), (f_s - now_s) * 1000 + (f_n - now_n) / 1e6)
end

-- Within the window of the charge its cost is part of the count. The window keeps its start, even if the refunded
-- charge began it.
local function refund_fixed_window(key, charge, t_s, t_n)
  local w_s, w_n = charge.w_s, charge.w_n
  local state = window_state(key, charge)
  if not state then
    return
  end
  local s, n, count = read_window(state)
  local end_s, end_n = add(s, n, w_s, w_n)
  if not before(now_s, now_n, end_s, end_n) then
    return
  end
  if t_s >= 0 and (before(t_s, t_n, s, n) or not before(t_s, t_n, end_s, end_n)) then
    return
  end
  local far_s, far_n = add(now_s, now_n, w_s, w_n)
  if before(far_s, far_n, s, n) then
    return
  end
  count = count - charge.cost
  if count <= 0 then
    call('UNLINK', key)
  elseif charge.from_first then
    patch_count(key, count)
  else
    call('SET', key, window_value(charge, s, n, count), 'KEEPTTL')
  end
end

-- The state of a counter with less in one bucket, and the part of the cost that the bucket did not contain.
local function decrease_bucket(state, index, cost)
  local at = 12 + index * 4
  local count = unpack('<I4', state, at + 1)
  local taken = min(count, cost)
  return sub(state, 1, at) .. pack('<I4', count - taken) .. sub(state, at + 5), cost - taken
end

-- The same for the buckets from `oldest` to the newest, as far as the cost goes.
local function decrease_buckets(state, oldest, cost)
  local index, count, left = oldest + 1, 0, cost
  while index > 0 and left > 0 do
    index = index - 1
    count = unpack('<I4', state, 13 + index * 4)
    local taken = min(count, left)
    count, left = count - taken, left - taken
  end
  if index > oldest then
    return state, left
  end
  -- All older ones are empty now.
  return sub(state, 1, 12 + index * 4) .. pack('<I4', count) .. zeros((oldest - index) * 4) .. sub(state, 17 + oldest * 4), left
end

-- The cost is part of the bucket of its instant while that bucket is kept. If the clock stepped back, the cost is in
-- a newer bucket, which leaves later; then less is refunded.
local function refund_counter(key, charge, t_s, t_n)
  local w_s, w_n, buckets = charge.w_s, charge.w_n, charge.buckets
  local state = of_size(call('GET', key), 16 + buckets * 4)
  if not state then
    return
  end
  local newest_q, newest_b = unpack('<dI4', state)
  local now_q, now_b = position(now_s, now_n, w_s, w_n, buckets)
  local ahead = (newest_q - now_q) * buckets + (newest_b - now_b)
  if ahead > buckets then
    return
  end
  local given = state
  if t_s >= 0 then
    local t_q, t_b = position(t_s, t_n, w_s, w_n, buckets)
    local index = (newest_q - t_q) * buckets + (newest_b - t_b)
    if index < 0 or index > buckets then
      return
    end
    given = decrease_bucket(state, index, charge.cost)
  else
    -- `moved` is the number of buckets by which the window has moved since. Where the bucket at the edge is weighed,
    -- only a share of it counts, so it comes last.
    local moved, left = max(-ahead, 0), charge.cost
    local oldest = (charge.edge == 2 and buckets or buckets - 1) - moved
    given, left = decrease_buckets(state, oldest, left)
    if charge.edge == 0 and moved <= buckets and left > 0 then
      given = decrease_bucket(given, buckets - moved, left)
    end
  end
  local left = find(given, '[^%z]', 13)
  if not left or (charge.edge == 1 and left > 12 + buckets * 4) then
    call('UNLINK', key)
  elseif given ~= state then
    call('SETRANGE', key, 12, sub(given, 13))
  end
end

-- The number of newest entries searched for a charge: first the recent ones, then more. A charge more than twice as far
-- back is not refunded.
local REFUND_ENTRIES = { 64, 4096 }

-- The entry that ends before a word of the tail: its first word, its instant and its cost; nil if the tail does not
-- contain it.
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

-- The number of words of the tail up to the last entry at or before an instant, by bisection: both words of an entry
-- have its instant.
local function tail_until(log, tail, count, t_s, t_n)
  local low, high = 0, count
  while low < high do
    local middle = floor((low + high) / 2)
    local n, s = unpack('<I4I4', tail, middle * 8 + 1)
    if n >= IS_COST and middle > 0 then
      n, s = unpack('<I4I4', tail, middle * 8 - 7)
    end
    if n < IS_COST and before(t_s, t_n, log.s - (log.s - s) % WORD, n < IS_LONG and n or n - IS_LONG) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

-- Drops entries that have left the window, then the oldest units up to the cost.
local function refund_oldest(log, charge)
  local at_s, at_n = now_s, now_n
  if before(at_s, at_n, log.s, log.n) then
    at_s, at_n = log.s, log.n
  end
  local gone_s, gone_n = subtract(at_s, at_n, charge.w_s, charge.w_n)
  if before(gone_s, gone_n, log.s, log.n) then
    drop_gone(log, gone_s, gone_n)
  else
    log.words, log.units = 0, 0
  end
  expire(log, charge.cost)
  if log.words == 0 then
    call('UNLINK', log.key)
    return
  end
  for _, cut in ipairs(log.cuts or {}) do
    call('SETRANGE', log.key, HEAD + cut[1] * 8, cut[2])
  end
  write_head(log)
end

-- Reduces an entry of that instant by the cost, and removes it if nothing is left. If the clock stepped back before
-- the charge and is still behind, the charge is at the newest instant. A log that counts all requests is not
-- refunded.
local function refund_log(key, charge, t_s, t_n)
  local cost, w_s, w_n = charge.cost, charge.w_s, charge.w_n
  local head = charge.counts_all and '' or open_log(key, HEAD - 1)
  if head == '' then
    return
  end
  local log = { key = key }
  read_head(log, head)
  local far_s, far_n = add(now_s, now_n, w_s, w_n)
  if before(far_s, far_n, log.s, log.n) then
    return
  end
  if t_s < 0 then
    log.text = head
    return refund_oldest(log, charge)
  end
  local is_behind = before(now_s, now_n, log.s, log.n) and not before(now_s, now_n, t_s, t_n)
  local count, tail, first, last, first_s, first_n, first_cost
  for _, entries in ipairs(REFUND_ENTRIES) do
    -- One entry more than is searched: if the newest is removed, the one before it becomes the newest.
    count = min(log.words, 2 * (entries + 1))
    tail = read_words(log, log.words - count, count)
    local at, is_over = count, count == log.words
    if not is_behind then
      at = tail_until(log, tail, count, t_s, t_n)
    end
    for _ = 1, entries do
      local from, s, n, entry_cost = entry_before(log, tail, at)
      if not from then
        break
      elseif before(s, n, t_s, t_n) then
        is_over = true
        break
      end
      if entry_cost >= cost then
        local is_it = s == t_s and n == t_n
        if is_it or (is_behind and not first and s == log.s and n == log.n) then
          first, last, first_s, first_n, first_cost = from, at, s, n, entry_cost
        end
        if is_it then
          is_over = true
          break
        end
      end
      at = from
    end
    if is_over or first then
      break
    end
  end
  if not first then
    return
  end
  local kept, kept_count = '', 0
  if first_cost > cost then
    kept, kept_count = words(first_s, first_n, first_cost - cost)
  elseif last == count then
    local _, s, n = entry_before(log, tail, first)
    log.s, log.n = s or 0, n or 0
  end
  local left = log.words - (last - first) + kept_count
  local leaves_s, leaves_n = add(log.s, log.n, w_s, w_n)
  if left == 0 or not before(now_s, now_n, leaves_s, leaves_n) then
    call('UNLINK', key)
    return
  end
  local moved = kept .. sub(tail, last * 8 + 1)
  if moved ~= '' then
    write_words(log, log.words - count + first, moved)
  end
  log.words, log.units = left, log.units - cost
  write_head(log)
end

-- Parses a packed charge. Each table is created with all its fields, because a growing table is slow.
local READ = {
  -- Bucket.
  function(packed_charge)
    local _, flags, cost, limit, f_d, f_t, f_f, c_d, c_t, c_f, ticks = unpack('<BBI4I4ddddddd', packed_charge)
    return {
      flags = flags, more = flags % 2 == 1, is_peek = flags % 4 >= PEEK,
      cost = cost, limit = limit, kind = token_bucket, refund = refund_token_bucket,
      f_d = f_d, f_t = f_t, f_f = f_f, c_d = c_d, c_t = c_t, c_f = c_f, ticks = ticks,
      far = multiple(FAR, f_d, f_t, f_f, ticks), far_injected = multiple(FAR_INJECTED, f_d, f_t, f_f, ticks),
      grain = grain_us((f_d * DAY_US + f_t / 1000) / limit) * 1000,
    }
  end,
  function(packed_charge)
    local _, flags, cost, limit, count, p_s, p_n = unpack('<BBI4I4ddI4', packed_charge)
    return {
      flags = flags, more = flags % 2 == 1, is_peek = flags % 4 >= PEEK,
      cost = cost, limit = limit, kind = stepped_token_bucket, refund = refund_stepped_token_bucket,
      count = count, p_s = p_s, p_n = p_n,
    }
  end,
  function(packed_charge)
    local _, flags, cost, limit, w_s, w_n, from_first = unpack('<BBI4I4dI4B', packed_charge)
    local is_number = from_first == 0 and w_n == 0 and limit < COUNTS / 2
    return {
      flags = flags, more = flags % 2 == 1, is_peek = flags % 4 >= PEEK,
      cost = cost, limit = limit, kind = fixed_window, refund = refund_fixed_window,
      fast = is_number and fast_window or nil, cost_text = is_number and '' .. cost or nil, refund_text = '-' .. cost,
      w_s = w_s, w_n = w_n, from_first = from_first == 1,
    }
  end,
  function(packed_charge)
    local _, flags, cost, limit, w_s, w_n, buckets, edge = unpack('<BBI4I4dI4I4B', packed_charge)
    return {
      flags = flags, more = flags % 2 == 1, is_peek = flags % 4 >= PEEK,
      cost = cost, limit = limit, refund = refund_counter,
      kind = counter, fast = buckets == 1 and fast_counter or nil,
      w_s = w_s, w_n = w_n, buckets = buckets, edge = edge,
    }
  end,
  function(packed_charge)
    local _, flags, cost, limit, w_s, w_n, counts_all = unpack('<BBI4I4dI4B', packed_charge)
    local ring_min = min(RING_MIN, limit)
    return {
      flags = flags, more = flags % 2 == 1, is_peek = flags % 4 >= PEEK,
      cost = cost, limit = limit, kind = log, refund = refund_log,
      fast = cost == 1 and counts_all == 0 and fast_log or nil,
      w_s = w_s, w_n = w_n, counts_all = counts_all == 1,
      -- Each unit takes at most one word, and a log of all requests keeps one unit above the limit.
      words_max = limit + counts_all, ring_min = ring_min,
      padding = rep('\0', HEAD - FIXED - 8 + ring_min * 8),
      grain_ms = (w_s * 1000 + w_n / 1e6) / LOG_GRAIN,
    }
  end,
  -- Bucket of whole microseconds.
  function(packed_charge)
    local _, flags, cost, limit, fill, cost_us = unpack('<BBI4I4dd', packed_charge)
    local f_d, c_d = floor(fill / DAY_US), floor(cost_us / DAY_US)
    local cost_us_text, grain = format('%d', cost_us), grain_us(fill / limit)
    local f_t = (fill - f_d * DAY_US) * 1000
    return {
      flags = flags, more = flags % 2 == 1, is_peek = flags % 4 >= PEEK,
      cost = cost, limit = limit, kind = token_bucket, refund = refund_token_bucket,
      fast = fast_token_bucket, fill = fill,
      cost_us = cost_us, cost_us_text = cost_us_text, refund_text = '-' .. cost_us_text,
      f_d = f_d, f_t = f_t, f_f = 0,
      far = multiple(FAR, f_d, f_t, 0, 1), far_injected = multiple(FAR_INJECTED, f_d, f_t, 0, 1),
      c_d = c_d, c_t = (cost_us - c_d * DAY_US) * 1000, c_f = 0, ticks = 1,
      grain_us = grain, grain = grain * 1000,
    }
  end,
  -- Bucket of one instant per key.
  function(packed_charge)
    local _, flags, cost, limit, f_d, f_t, f_f, c_d, c_t, c_f, ticks = unpack('<BBI4I4ddddddd', packed_charge)
    local fill_s = f_d * DAY + ceil((f_t + (f_f > 0 and 1 or 0)) / SECOND)
    return {
      flags = flags, more = flags % 2 == 1, is_peek = flags % 4 >= PEEK,
      cost = cost, limit = limit, kind = token_bucket,
      f_d = f_d, f_t = f_t, f_f = f_f, c_d = c_d, c_t = c_t, c_f = c_f, ticks = ticks,
      fill_s = min(fill_s, SECONDS_MAX), grain = 0,
    }
  end,
}

-- Cache of parsed charges by their text. There are few: the number of limits times the number of costs.
local parsed, parsed_count = {}, 0
local PARSED_MAX = 1024

local function read(packed_charge)
  local charge = READ[byte(packed_charge)](packed_charge)
  local flags, cost = charge.flags, charge.cost
  if flags >= REFUND then
    -- Each refund has its own instant, so caching it is useless.
    charge.fast = nil
    charge.t_s, charge.t_n = unpack('<dI4', packed_charge, #packed_charge - 11)
    return charge
  end
  if charge.is_peek or cost == 0 or cost > charge.limit then
    charge.fast = nil
  end
  -- INCRBY reports a foreign value without an error.
  charge.counts_by_incrby = charge.fast == fast_token_bucket or charge.fast == fast_window
  charge.fast = charge.fast and charge.fast(charge)
  if parsed_count == PARSED_MAX then
    parsed, parsed_count = {}, 0
  end
  parsed[packed_charge], parsed_count = charge, parsed_count + 1
  return charge
end

-- The reply to a charge that was not decided by a fast path: flags, and the state if there was one. A charge is
-- decided if its limit allowed or denied it.
local function decision(allowed, is_decided, state)
  local flags = (allowed and ALLOWED or 0) + (is_decided and DECIDED or 0)
  if not state then
    return flags
  end
  -- A log that is already packed is a string, which has no field `s`.
  return flags + STATE, state.s and encode_log(state) or state
end

-- Decides a request of one charge that has no fast path, or whose fast path returned no flags.
local function decide_slowly(key, charge)
  if charge.flags >= REFUND then
    charge.refund(key, charge, charge.t_s, charge.t_n)
    return DECIDED
  end
  local allowed, state, write, value, ms = charge.kind(key, charge)
  if write and not charge.is_peek then
    write(key, value, ms, allowed)
  end
  return decision(allowed, not charge.is_peek, state)
end

local function packed(flags, state)
  if flags >= NUMBER then
    return pack('<Bd', flags, state)
  elseif state then
    return pack('<Bc0', flags, state)
  end
  return char(flags)
end

-- Decides a request of one charge.
local function decide_one(key, charge)
  if now_us and charge.fast then
    local flags, state = charge.fast(key)
    if flags then
      return flags, state
    end
  end
  return decide_slowly(key, charge)
end

-- Decides the charges first to last of one request: all are decided, then all are made or none.
local function decide_several(keys, charges, first, last, replies)
  local outcomes = {}
  local all = true
  for i = first, last do
    outcomes[i] = { charges[i].kind(keys[i], charges[i]) }
    all = all and outcomes[i][1]
  end
  for i = first, last do
    local charge, outcome = charges[i], outcomes[i]
    local allowed, state, write = outcome[1], outcome[2], outcome[3]
    -- A denying limit always decides, and a log of all requests counts this request too.
    local is_decided = not charge.is_peek and (all or not allowed or charge.counts_all)
    if is_decided and write then
      write(keys[i], outcome[4], outcome[5], all)
    end
    replies[i + 1] = packed(decision(allowed, is_decided, state))
  end
end

-- The last second of the clock as text and as a number, which is valid for many calls.
local second_text, second, second_us

local function decide(keys, arguments)
  if not call then
    bind()
  end
  local count = #keys
  local at = arguments[count + 1]
  if not at then
    local time = call('TIME')
    if time[1] ~= second_text then
      second_text, second = time[1], time[1] + 0
      second_us = second * MICROS
    end
    local us = time[2] + 0
    now_s, now_n, now_us, extra = second, us * 1000, second_us + us, 0
  else
    now_s, now_n = unpack('<dI4', at)
    extra = EXPIRY_EXTRA
    now_us = now_n % 1000 == 0 and now_s > 0 and now_s < WORD and now_s * MICROS + now_n / 1000 or nil
  end
  local packed_charge = arguments[1]
  local charge = parsed[packed_charge] or read(packed_charge)
  if count == 1 and now_us then
    -- As `decide_one` does, without a call.
    local fast, key, flags, state = charge.fast, keys[1]
    if fast then
      flags, state = fast(key)
    end
    if not flags then
      flags, state = decide_slowly(key, charge)
    end
    if flags >= NUMBER then
      return pack('<dBd', now_us, flags, state)
    elseif state then
      return pack('<dBc0', now_us, flags, state)
    end
    return pack('<dB', now_us, flags)
  end
  local replies = { now_us and pack('<d', now_us) or pack('<ddI4', -1, now_s, now_n) }
  local i = 1
  while i <= count do
    if i > 1 then
      packed_charge = arguments[i]
      charge = parsed[packed_charge] or read(packed_charge)
    end
    if not charge.more then
      local flags, state
      local decide_rest = decide_one
      if charge.counts_by_incrby and now_us then
        flags, state = charge.fast(keys[i])
        decide_rest = decide_slowly
      end
      if not flags then
        -- A foreign value in one key must not fail the other requests of the call.
        local is_right
        is_right, flags, state = pcall(decide_rest, keys[i], charge)
        flags = is_right and flags
      end
      replies[i + 1] = flags and packed(flags, state) or GARBLED
      i = i + 1
    else
      local charges = { [i] = charge }
      local last = i
      while last < count and charges[last].more do
        last = last + 1
        packed_charge = arguments[last]
        charges[last] = parsed[packed_charge] or read(packed_charge)
      end
      if not pcall(decide_several, keys, charges, i, last, replies) then
        -- Foreign values are found while deciding, before any charge. Only `extend_window` may have written.
        for j = i, last do
          replies[j + 1] = GARBLED
        end
      end
      i = last + 1
    end
  end
  return concat(replies)
end

redis.register_function('@charge@', decide)
