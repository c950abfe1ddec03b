-- For wrk: counts responses by status, because wrk itself only counts errors.

local threads = {}

function setup(thread)
  table.insert(threads, thread)
end

function init()
  allowed, denied, other = 0, 0, 0
end

function response(status)
  if status == 200 then
    allowed = allowed + 1
  elseif status == 429 then
    denied = denied + 1
  else
    other = other + 1
  end
end

function done(summary)
  local all = { allowed = 0, denied = 0, other = 0 }
  for _, thread in ipairs(threads) do
    for name in pairs(all) do
      all[name] = all[name] + thread:get(name)
    end
  end
  local errors = summary.errors
  local failed = errors.connect + errors.read + errors.write + errors.timeout
  print(string.format("counted: %d %d %d %d", all.allowed, all.denied, all.other, failed))
end
