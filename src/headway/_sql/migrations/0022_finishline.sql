-- Which call was answered that it completed the project: Redis may forget its decision and make it again, SQL does not.
ALTER TABLE projects ADD COLUMN completed_by TEXT;
