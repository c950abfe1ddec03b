-- Checks of keys by POST: wrk ... --script check.lua URL -- BODY KEYS
--   BODY  what is sent, with %s where the key belongs
--   KEYS  how many keys there are
-- The requests are built before the run, so that the load generator uses little processor time.

local requests = {}

function init(args)
   local headers = { ["Content-Type"] = "application/json", ["Host"] = wrk.headers["Host"] }
   for number = 1, tonumber(args[2]) do
      local key = string.format("user:%012d", number - 1)
      requests[number] = wrk.format("POST", nil, headers, string.format(args[1], key))
   end
end

function request()
   return requests[math.random(#requests)]
end
