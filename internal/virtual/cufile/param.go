package cufile

import (
	"slices"

	"github.com/gochorus/chorus/internal/cufileapi"
)

// config holds cuFile's parameters.
type config struct {
	sizes   [cufileapi.NumSizeTParams]uintptr
	bools   [cufileapi.NumBoolParams]bool
	strings [cufileapi.NumStringParams]string

	slabSizesKB, slabCounts []uintptr
}

// defaults returns the parameters without a cufile.json, which is missing on
// most machines with the library from a Python wheel.
func defaults() config {
	var c config
	c.sizes = [...]uintptr{
		cufileapi.MaxIOQueueDepth:          128,
		cufileapi.MinIOThresholdSizeKB:     1024,
		cufileapi.MaxDirectIOSizeKB:        1024,
		cufileapi.MaxDeviceCacheSizeKB:     131072,
		cufileapi.PerBufferCacheSizeKB:     1024,
		cufileapi.MaxDevicePinnedMemSizeKB: 33554432,
		cufileapi.IOBatchSize:              128,
		cufileapi.PollThresholdSizeKB:      4,
		cufileapi.BatchIOTimeoutMillis:     5,
	}
	c.bools[cufileapi.ParamAllowCompatMode] = true
	c.bools[cufileapi.AllowSystemMemory] = true
	c.strings[cufileapi.LoggingLevel] = "ERROR"
	c.slabSizesKB, c.slabCounts = []uintptr{4, 1024, 16384}, []uintptr{128, 64, 64}
	return c
}

// ranges holds the valid range of each parameter. A maximum of 0 means no
// limit; cuFile reports 0 then, too. ProfileStats has no range to query.
var ranges = [cufileapi.NumSizeTParams]struct{ least, greatest uintptr }{
	cufileapi.ProfileStats:             {0, 3},
	cufileapi.MaxIOQueueDepth:          {1, 256},
	cufileapi.MaxIOThreads:             {0, 32},
	cufileapi.MinIOThresholdSizeKB:     {4, 1<<32 - 1},
	cufileapi.MaxRequestParallelism:    {0, 8},
	cufileapi.MaxDirectIOSizeKB:        {64, 16384},
	cufileapi.MaxDeviceCacheSizeKB:     {0, 0},
	cufileapi.PerBufferCacheSizeKB:     {64, 16384},
	cufileapi.MaxDevicePinnedMemSizeKB: {64, 0},
	cufileapi.IOBatchSize:              {1, 256},
	cufileapi.PollThresholdSizeKB:      {4, 1<<54 - 4},
	cufileapi.BatchIOTimeoutMillis:     {1, 1000},
}

func inRange(p cufileapi.SizeTParam, v uintptr) bool {
	r := ranges[p]
	return v >= r.least && (v <= r.greatest || r.greatest == 0)
}

// streams reports whether transfers can be enqueued on streams.
func (c *config) streams() bool {
	return c.bools[cufileapi.ParallelIO] && c.sizes[cufileapi.MaxIOThreads] > 0
}

func (c *config) properties() cufileapi.DrvProps {
	bit := func(set bool, n int) uint32 {
		if set {
			return 1 << n
		}
		return 0
	}
	return cufileapi.DrvProps{
		PollThreshSize:  c.sizes[cufileapi.PollThresholdSizeKB],
		MaxDirectIOSize: c.sizes[cufileapi.MaxDirectIOSizeKB],
		DControlFlags: bit(c.bools[cufileapi.ParamUsePollMode], cufileapi.UsePollMode) |
			bit(c.bools[cufileapi.ParamAllowCompatMode], cufileapi.AllowCompatMode),
		FFlags: bit(true, cufileapi.BatchIOSupported) | bit(c.streams(), cufileapi.StreamsSupported) |
			bit(c.bools[cufileapi.ParallelIO], cufileapi.ParallelIOSupported),
		MaxDeviceCacheSize:      uint32(c.sizes[cufileapi.MaxDeviceCacheSizeKB]),
		PerBufferCacheSize:      uint32(c.sizes[cufileapi.PerBufferCacheSizeKB]),
		MaxDevicePinnedMemSize:  uint32(c.sizes[cufileapi.MaxDevicePinnedMemSizeKB]),
		MaxBatchIOSize:          uint32(c.sizes[cufileapi.IOBatchSize]),
		MaxBatchIOTimeoutMillis: uint32(c.sizes[cufileapi.BatchIOTimeoutMillis]),
	}
}

// config returns the configuration that getters read.
func (l *lib) config() *config {
	if l.uses > 0 {
		return &l.running
	}
	return &l.staged
}

// stage sets a parameter if it is valid and the driver is closed.
func (l *lib) stage(f cufileapi.Func, valid bool, set func(*config)) cufileapi.Result {
	_, r := l.enter(f)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	switch {
	case l.uses > 0:
		return cufileapi.DriverAlreadyOpen
	case !valid:
		return cufileapi.InvalidValue
	}
	set(&l.staged)
	return cufileapi.Success
}

// look reads a parameter if it exists.
func (l *lib) look(f cufileapi.Func, valid bool, get func(*config)) cufileapi.Result {
	_, r := l.enter(f)
	if r != cufileapi.Success {
		return r
	}
	defer l.leave()
	if !valid {
		return cufileapi.InvalidValue
	}
	get(l.config())
	return cufileapi.Success
}

func knownSizeT(p cufileapi.SizeTParam) bool { return p >= 0 && p < cufileapi.NumSizeTParams }

func knownBool(p cufileapi.BoolParam) bool {
	return p >= 0 && p < cufileapi.NumBoolParams && p != cufileapi.ProfileNVTX
}

func knownString(p cufileapi.StringParam) bool { return p >= 0 && p < cufileapi.NumStringParams }

func (l *lib) SetParameterSizeT(p cufileapi.SizeTParam, v uintptr) cufileapi.Result {
	return l.stage(cufileapi.FuncSetParameterSizeT, knownSizeT(p) && inRange(p, v), func(c *config) { c.sizes[p] = v })
}

func (l *lib) SetParameterBool(p cufileapi.BoolParam, v bool) cufileapi.Result {
	return l.stage(cufileapi.FuncSetParameterBool, knownBool(p), func(c *config) { c.bools[p] = v })
}

func (l *lib) SetParameterString(p cufileapi.StringParam, v string) cufileapi.Result {
	return l.stage(cufileapi.FuncSetParameterString, knownString(p), func(c *config) { c.strings[p] = v })
}

func (l *lib) GetParameterSizeT(p cufileapi.SizeTParam) (v uintptr, r cufileapi.Result) {
	r = l.look(cufileapi.FuncGetParameterSizeT, knownSizeT(p), func(c *config) { v = c.sizes[p] })
	return v, r
}

func (l *lib) GetParameterBool(p cufileapi.BoolParam) (v bool, r cufileapi.Result) {
	r = l.look(cufileapi.FuncGetParameterBool, knownBool(p), func(c *config) { v = c.bools[p] })
	return v, r
}

func (l *lib) GetParameterString(p cufileapi.StringParam) (v string, r cufileapi.Result) {
	r = l.look(cufileapi.FuncGetParameterString, knownString(p), func(c *config) { v = c.strings[p] })
	return v, r
}

func (l *lib) GetParameterMinMaxValue(p cufileapi.SizeTParam) (least, greatest uintptr, r cufileapi.Result) {
	r = l.look(cufileapi.FuncGetParameterMinMaxValue, knownSizeT(p) && p != cufileapi.ProfileStats, func(*config) {
		least, greatest = ranges[p].least, ranges[p].greatest
	})
	return least, greatest, r
}

func (l *lib) SetParameterPosixPoolSlabArray(sizesKB, counts []uintptr) cufileapi.Result {
	valid := len(sizesKB) > 0 && len(sizesKB) == len(counts) && !slices.Contains(sizesKB, 0) && !slices.Contains(counts, 0)
	return l.stage(cufileapi.FuncSetParameterPosixPoolSlabArray, valid, func(c *config) {
		c.slabSizesKB, c.slabCounts = slices.Clone(sizesKB), slices.Clone(counts)
	})
}

func (l *lib) GetParameterPosixPoolSlabArray(sizesKB, counts []uintptr) cufileapi.Result {
	r := cufileapi.InvalidValue
	if failed := l.look(cufileapi.FuncGetParameterPosixPoolSlabArray, len(sizesKB) == len(counts), func(c *config) {
		if len(sizesKB) == len(c.slabSizesKB) {
			copy(sizesKB, c.slabSizesKB)
			copy(counts, c.slabCounts)
			r = cufileapi.Success
		}
	}); failed != cufileapi.Success {
		return failed
	}
	return r
}
