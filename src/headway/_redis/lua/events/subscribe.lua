-- events/subscribe.lua: create the consumer group of a sink at the start of the stream.
-- KEYS[1] smap:events   stream
-- KEYS[2] smap:events:hold   string   while it exists no entry leaves the stream
-- ARGV[1] name of the sink and of its group
-- ARGV[2] seconds to hold the stream if the group is created again, because Redis lost the stream; else 0
-- returns OK | EXISTS
-- A server at its maxmemory refuses the first write of a script, but never PERSIST. A group is small, and without it no
-- entry would ever leave the stream.
redis.call('PERSIST', KEYS[1])
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if made.err and string.find(made.err, 'BUSYGROUP', 1, true) then return 'EXISTS' end
if not made.err and tonumber(ARGV[2]) > 0 then redis.call('SET', KEYS[2], 1, 'EX', ARGV[2]) end
return made
