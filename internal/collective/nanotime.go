//go:build !nolinkname

package collective

import _ "unsafe" // for linkname

// nanotime is the system's monotonic clock, without the overhead of time.Now.
//
//go:linkname nanotime runtime.nanotime
func nanotime() int64
