package nccl

import (
	"time"
	_ "unsafe" // for linkname
)

// nanotime is the time of time.Now that never goes back, without the way there.
//
//go:linkname nanotime runtime.nanotime
func nanotime() int64

// origin is where the recorder's clock begins, which never goes back, and originNanos the
// same by nanotime.
var origin, originNanos = time.Now(), nanotime()

func now() int64 { return nanotime() - originNanos }

func moment(ns int64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return origin.Add(time.Duration(ns)).Round(0)
}
