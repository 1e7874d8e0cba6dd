package fabric

import "github.com/gochorus/chorus/internal/ptx"

// Version tells kernels from others: times that were measured with one say nothing of
// another.
func Version() string { return ptx.Digest(source, nil)[:12] }
