-- The baseline: a sorted set of requests, and a sequence that keeps its members apart.
local limit, window = tonumber(ARGV[1]), tonumber(ARGV[2])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local log_key, sequence_key = KEYS[1] .. ':log', KEYS[1] .. ':seq'
local start = now - window
redis.call('ZREMRANGEBYSCORE', log_key, 0, start)
local count = redis.call('ZCARD', log_key)
local allowed = count < limit
if allowed then
  local sequence = redis.call('INCR', sequence_key)
  redis.call('EXPIRE', sequence_key, window * 2)
  redis.call('ZADD', log_key, now, clock[1] .. ':' .. clock[2] .. ':' .. sequence)
  redis.call('EXPIRE', log_key, window * 2)
  count = count + 1
end
return { allowed and 1 or 0, count, limit, start }
