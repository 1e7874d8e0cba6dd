package gds

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
)

// An Engine is the path of bytes between a file and device memory.
type Engine uint8

// The engines. CuFile falls back to Direct, and Direct falls back to Cached.
const (
	Auto   Engine = iota // chosen for each file, and for each part
	Cached               // through the page cache, or from tmpfs, and through pinned memory
	Direct               // around the page cache (O_DIRECT), through pinned memory
	CuFile               // by NVIDIA's cuFile
	engines
)

var engineNames = [engines]string{"auto", "cached", "direct", "cufile"}

// String returns the name of the engine in CHORUS_GDS_ENGINE.
func (e Engine) String() string {
	if e < engines {
		return engineNames[e]
	}
	return fmt.Sprintf("Engine(%d)", uint8(e))
}

// engineOf returns the engine of the configuration, or of the environment.
func engineOf(c FileConfig) (Engine, error) {
	if c.Engine >= engines {
		return Auto, fmt.Errorf("there is no engine %d", uint8(c.Engine))
	}
	if c.Engine != Auto {
		return c.Engine, nil
	}
	name, err := env.GDSEngine.OneOf(engineNames[:]...)
	if err != nil {
		return Auto, err
	}
	for e, n := range engineNames {
		if n == name {
			return Engine(e), nil
		}
	}
	return Auto, nil
}

// threadsOf returns the number of threads of one call, or 0 if it depends on the device.
func threadsOf(c FileConfig) (int, error) {
	n := c.Threads
	if n == 0 {
		var err error
		if n, err = env.GDSThreads.Int(); err != nil {
			return 0, err
		}
	}
	if n < 0 || n > maxThreads {
		return 0, fmt.Errorf("%d threads: want 1 to %d, or 0 for as many as the machine's cores allow each device", n, maxThreads)
	}
	return n, nil
}

const (
	minThreads = 4
	enough     = 16 // so many threads copying from the page cache saturate the bus
	maxThreads = 1024
)

// defaultThreads returns the device's part of the cores.
func defaultThreads(d *device.Device) int {
	return min(max(runtime.NumCPU()/len(d.System().Devices()), minThreads), enough)
}

// refused reports whether an error means that the engine does not work for the file,
// rather than that the file cannot be read.
func refused(e Engine, err error) bool {
	switch e {
	case Direct:
		return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM)
	}
	return false
}
