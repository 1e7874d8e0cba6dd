package fabric

import "github.com/gochorus/chorus/internal/ptx"

// Version identifies the kernels: measurements with one version are not valid for another.
func Version() string { return ptx.Digest(source, nil)[:12] }
