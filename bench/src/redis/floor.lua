#!lua name=floor
-- The floor: functions that do only what Redis itself needs for a decision, and decide nothing. They take the arguments
-- of the library and reply with a text as long as its.

local call
local REPLY = ('x'):rep(17)

-- The name gets the length of the names of the library's functions.
local function register(name, operation)
  redis.register_function(name .. ('_'):rep(27 - #name), function(keys)
    call = call or redis.call
    operation(keys[1])
    return REPLY
  end)
end

register('floor_empty', function() end)

register('floor_incrby', function(key)
  call('TIME')
  call('INCRBY', key, '1')
end)

register('floor_set', function(key)
  call('TIME')
  call('GET', key)
  call('SET', key, 'twenty bytes of text', 'PX', '3600000')
end)

register('floor_setrange', function(key)
  call('TIME')
  call('GET', key)
  call('SETRANGE', key, '12', 'four')
end)

register('floor_getrange', function(key)
  call('TIME')
  call('GETRANGE', key, '0', '97')
end)
