-- lease/acquire.lua: acquire a lease unless another owner has it.
-- KEYS[1] the lease                  string  "token owner"
-- KEYS[2] headway:lease:token        string  counter: every new owner gets its own number
-- ARGV[1] owner   ARGV[2] milliseconds   ARGV[3] a value of KEYS[1] whose owner is dead, or ""
-- returns {"ACQUIRED", token} | {"HELD", value}
-- A server at its maxmemory refuses the first write of a script, but never PERSIST. A lease is small and expires soon.
redis.call('PERSIST', KEYS[2])
local held = redis.call('GET', KEYS[1])
if held then
  local token, owner = string.match(held, '^(%d+) (.*)$')
  if owner == ARGV[1] then
    -- A repeated call: its first reply was lost.
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return {'ACQUIRED', tonumber(token)}
  end
  if held ~= ARGV[3] then
    -- Redis expires keys by its wall clock. More time left than the full duration means that the clock was set back.
    local read, known = pcall(cjson.decode, owner or '')
    local whole = read and type(known) == 'table' and tonumber(known['seconds'])
    if whole and redis.call('PTTL', KEYS[1]) > (whole + 1) * 1000 then
      redis.call('PEXPIRE', KEYS[1], math.max(1, math.floor(whole * 1000)))
    end
    return {'HELD', held}
  end
end
local token = redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], token .. ' ' .. ARGV[1], 'PX', ARGV[2])
return {'ACQUIRED', token}
