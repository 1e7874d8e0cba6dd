package gds

import (
	"errors"
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
)

// An Engine is the way that bytes take between a file and device memory.
type Engine uint8

// The engines. What one cannot do, the next one of CuFile, Direct and Cached does.
const (
	Auto   Engine = iota // chosen for each file, and for each part of it
	Cached               // by the page cache, or from tmpfs, through pinned memory
	Direct               // past the page cache (O_DIRECT), through pinned memory
	CuFile               // by NVIDIA's cuFile
	engines
)

var engineNames = [engines]string{"auto", "cached", "direct", "cufile"}

// String returns the name that CHORUS_GDS_ENGINE has for it.
func (e Engine) String() string {
	if e < engines {
		return engineNames[e]
	}
	return fmt.Sprintf("Engine(%d)", uint8(e))
}

// engineOf returns the engine that the configuration names, or the environment.
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

// threadsOf returns how many threads one call uses, or 0 where it depends on the
// device.
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
	enough     = 16 // with which one thread's copies from the page cache fill the bus
	maxThreads = 1024
)

// defaultThreads is the device's share of the cores.
func defaultThreads(d *device.Device) int {
	return min(max(runtime.NumCPU()/len(d.System().Devices()), minThreads), enough)
}

// refused reports whether an error means that an engine does not work for the
// file, and not that the file cannot be read.
func refused(e Engine, err error) bool {
	switch e {
	case Direct:
		return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM)
	}
	return false
}
