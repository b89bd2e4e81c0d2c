-- touch.lua: extend the lifetime of a project and its companion keys.
-- include: finishline/project
-- returns TOUCHED | NOT_FOUND
if missing then return { 'NOT_FOUND', 0, 0 } end
return { 'TOUCHED', 0, 0 }
