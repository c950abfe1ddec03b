-- The baseline: two keys a bucket, whole units leak.
local capacity, rate, ttl = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local queue_key, stamp_key = KEYS[1] .. ':queue', KEYS[1] .. ':timestamp'
local leaked_at = tonumber(redis.call('GET', stamp_key)) or now
local queue = tonumber(redis.call('GET', queue_key)) or 0
local leaked = math.floor(math.max(0, now - leaked_at) * rate)
if leaked > 0 then
  queue = math.max(0, queue - leaked)
  leaked_at = leaked_at + leaked / rate
end
local allowed = queue < capacity
if allowed then
  queue = queue + 1
end
redis.call('SETEX', queue_key, ttl, queue)
redis.call('SETEX', stamp_key, ttl, leaked_at)
return { allowed and 1 or 0, queue, capacity }
