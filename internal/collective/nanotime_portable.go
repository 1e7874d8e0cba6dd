//go:build nolinkname

package collective

import "time"

var clockStart = time.Now()

// nanotime is the system's monotonic clock.
func nanotime() int64 { return int64(time.Since(clockStart)) }
