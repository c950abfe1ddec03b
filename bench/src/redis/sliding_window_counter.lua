-- The baseline: one key a window, the previous one weighed.
local limit, window = tonumber(ARGV[1]), tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local number = math.floor(now / window)
local key, previous_key = KEYS[1] .. ':' .. number, KEYS[1] .. ':' .. (number - 1)
local previous = tonumber(redis.call('GET', previous_key)) or 0
local count = tonumber(redis.call('GET', key)) or 0
local gone = (now - number * window) / window
local weighed = previous * (1 - gone) + count
local allowed = weighed < limit
if allowed then
  count = redis.call('INCR', key)
  redis.call('EXPIRE', key, window * 2)
  weighed = previous * (1 - gone) + count
end
return { allowed and 1 or 0, math.floor(weighed), limit, (number + 1) * window, previous, count }
