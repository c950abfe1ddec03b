-- The baseline: two keys a bucket, text numbers, a fixed expiry.
local capacity, rate, cost, ttl = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local tokens_key, stamp_key = KEYS[1] .. ':tokens', KEYS[1] .. ':timestamp'
local tokens = tonumber(redis.call('GET', tokens_key)) or capacity
local stamp = tonumber(redis.call('GET', stamp_key)) or now
tokens = math.min(capacity, tokens + math.max(0, now - stamp) * rate)
local allowed = tokens >= cost
if allowed then
  tokens = tokens - cost
end
redis.call('SETEX', tokens_key, ttl, tostring(tokens))
redis.call('SETEX', stamp_key, ttl, tostring(now))
return { allowed and 1 or 0, tostring(tokens), capacity }
