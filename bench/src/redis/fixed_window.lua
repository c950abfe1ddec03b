-- The baseline: one key a window, made inside the script.
local limit, window = tonumber(ARGV[1]), tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local number = math.floor(now / window)
local key = KEYS[1] .. ':' .. number
local count = tonumber(redis.call('GET', key)) or 0
local allowed = count < limit
if allowed then
  count = redis.call('INCR', key)
  redis.call('EXPIRE', key, window * 2)
end
return { allowed and 1 or 0, count, limit, (number + 1) * window }
