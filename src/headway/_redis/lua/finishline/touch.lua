-- touch.lua: let a project and its companions live as long as after a write.
-- include: finishline/project
-- returns TOUCHED | NOT_FOUND
if missing then return { 'NOT_FOUND', 0, 0 } end
return { 'TOUCHED', 0, 0 }
