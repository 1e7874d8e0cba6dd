package ddp_test

import "github.com/gochorus/chorus/internal/testgpu/groups"

var local, join, shards, read = groups.Local, groups.Join, groups.Shards, groups.Read
