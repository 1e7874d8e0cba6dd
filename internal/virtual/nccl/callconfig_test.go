package nccl

import (
	"testing"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

const newest = 23203

// text returns a C string.
func text(s string) *byte { return &append([]byte(s), 0)[0] }

func TestSelections(t *testing.T) {
	for _, x := range []struct {
		k         kind
		selection string
		wrong     string
	}{
		{kindAllReduce, "", ""}, {kindAlltoAll, "", ""},
		{kindAllReduce, "ring", ""}, {kindAllReduce, "Tree_LL128", ""}, {kindAllReduce, "nvls, ring", ""},
		{kindAllReduce, "ring + ^RING_LL128", ""}, {kindAllReduce, "^symk", ""}, {kindBroadcast, "^tree", ""},
		{kindAllReduce, "ring+tree", "no algorithm of all_reduce"}, {kindAllReduce, "nvls", "no algorithm"},
		{kindBroadcast, "tree", "no algorithm of broadcast"}, {kindBroadcast, "^ring", "no algorithm"},
		{kindAlltoAll, "ring", "no algorithm of all_to_all"}, {kindAllGather, "pat", "no algorithm"},
		{kindAllReduce, "ring + ^ring_ll + ^ring_s + ^ring_ll128", "no algorithm"},
		{kindAllReduce, "bogus", `"bogus" is not an algorithm`}, {kindAllReduce, "ring,", `"" is not an algorithm`},
		{kindAllReduce, "ring;tree", `"ring;tree" is not an algorithm`}, {kindAllReduce, "^", `"" is not`},
	} {
		got := checkSelection(x.k, x.selection)
		if x.wrong == "" {
			require.Empty(t, got, x.selection)
			continue
		}
		require.Contains(t, got, x.wrong, x.selection)
	}
}

func TestConfigurationsOfCalls(t *testing.T) {
	c := newClanOf(t, machine.Config{Devices: 2}, newest)
	p := c.Alloc(0, 64)
	timing := c.Event(0)
	for want, change := range map[string]func(*ncclapi.CollConfig){
		"of another version: 64 bytes": func(x *ncclapi.CollConfig) { x.Stamp(23102) },
		"is not initialised":           func(x *ncclapi.CollConfig) { x.Magic = 1 },
		"forceAlgSelection is 2":       func(x *ncclapi.CollConfig) { x.ForceAlgSelection = 2 },
		"forceAlgSelection is -1":      func(x *ncclapi.CollConfig) { x.ForceAlgSelection = -1 },
		"CTAPolicy is 4":               func(x *ncclapi.CollConfig) { x.CTAPolicy = 4 },
		"CTAPolicy is -1":              func(x *ncclapi.CollConfig) { x.CTAPolicy = -1 },
		"minCTAs is 0":                 func(x *ncclapi.CollConfig) { x.MinCTAs = 0 },
		"minCTAs is 4 and maxCTAs 2":   func(x *ncclapi.CollConfig) { x.MinCTAs, x.MaxCTAs = 4, 2 },
		"nvlsCTAs 65":                  func(x *ncclapi.CollConfig) { x.NVLSCTAs = 65 },
		"cgaClusterSize is 9":          func(x *ncclapi.CollConfig) { x.CGAClusterSize = 9 },
		"reserves the highest bit":     func(x *ncclapi.CollConfig) { x.UserProfilerTag = 1 << 63 },
		`"nvls": no algorithm`:         func(x *ncclapi.CollConfig) { x.AlgSelection = text("nvls") },
		"0x1234 is not an event":       func(x *ncclapi.CollConfig) { x.LaunchCompletionEvent = 0x1234 },
		"is of device 1":               func(x *ncclapi.CollConfig) { x.LaunchCompletionEvent = uintptr(c.untimed(1)) },
		"measures time":                func(x *ncclapi.CollConfig) { x.LaunchCompletionEvent = uintptr(timing) },
	} {
		cfg := ncclapi.NewCollConfig(newest)
		change(cfg)
		require.Equal(t, ncclapi.InvalidArgument,
			c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 1, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[0], Stream: c.streams[0], Config: cfg}), want)
		require.Contains(t, c.api.GetLastError(0), want)
	}
	cfg := ncclapi.NewCollConfig(newest)
	cfg.AlgSelection, cfg.ForceAlgSelection = text("nvls"), 0
	cfg.UserProfilerTag = 7
	require.Equal(t, []int32{3}, c.total(cfg, nil))
}

func (c *clan) untimed(dev int) (e cudadrv.Event) {
	c.Do(dev, func() (r cudadrv.Result) { e, r = c.Drv.EventCreate(cudadrv.EventDisableTiming); return r })
	return e
}

// total reduces the numbers of two ranks with their configurations.
func (c *clan) total(a, b *ncclapi.CollConfig) []int32 {
	c.T.Helper()
	if b == nil {
		b = a
	}
	p := []cudadrv.DevicePtr{c.Alloc(0, 64), c.Alloc(1, 64)}
	for rank, cfg := range []*ncclapi.CollConfig{a, b} {
		virtualtest.Upload(c.Rig, rank, c.streams[rank], p[rank], []int32{int32(rank + 1)})
		c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p[rank], Recv: p[rank], Count: 1, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[rank], Stream: c.streams[rank], Config: cfg}))
	}
	return virtualtest.Download[int32](c.Rig, 0, c.streams[0], p[0], 1)
}

// The event tells that the launch has begun, while it waits for the other rank.
func TestLaunchCompletionEvent(t *testing.T) {
	c := newClanOf(t, machine.Config{Devices: 2}, newest)
	p := []cudadrv.DevicePtr{c.Alloc(0, 64), c.Alloc(1, 64)}
	events := []cudadrv.Event{c.untimed(0), c.untimed(1)}
	issue := func(rank int) {
		cfg := ncclapi.NewCollConfig(newest)
		cfg.LaunchCompletionEvent = uintptr(events[rank])
		virtualtest.Upload(c.Rig, rank, c.streams[rank], p[rank], []int32{int32(rank + 1)})
		c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p[rank], Recv: p[rank], Count: 1, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[rank], Stream: c.streams[rank], Config: cfg}))
	}
	issue(0)
	c.Do(0, func() cudadrv.Result { return c.Drv.EventSynchronize(events[0]) })
	require.Equal(t, cudadrv.ErrorNotReady, c.On(0, func() cudadrv.Result { return c.Drv.StreamQuery(c.streams[0]) }))
	issue(1)
	for rank := range 2 {
		require.Equal(t, []int32{3}, virtualtest.Download[int32](c.Rig, rank, c.streams[rank], p[rank], 1))
	}
}

func TestConfigurationsThatDiffer(t *testing.T) {
	for want, change := range map[string]func(x *ncclapi.CollConfig, c *clan){
		"a launch-completion event": func(x *ncclapi.CollConfig, c *clan) { x.LaunchCompletionEvent = uintptr(c.untimed(1)) },
		"configuration ":            func(x *ncclapi.CollConfig, _ *clan) { x.MaxCTAs = 3 },
	} {
		t.Run(want, func(t *testing.T) {
			c := newClanOf(t, machine.Config{Devices: 2}, newest)
			other := ncclapi.NewCollConfig(newest)
			change(other, c)
			p := []cudadrv.DevicePtr{c.Alloc(0, 64), c.Alloc(1, 64)}
			for rank, cfg := range []*ncclapi.CollConfig{ncclapi.NewCollConfig(newest), other} {
				c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p[rank], Recv: p[rank], Count: 1, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[rank], Stream: c.streams[rank], Config: cfg}))
			}
			for rank := range 2 {
				require.Contains(t, c.wait(rank, ncclapi.InvalidUsage), want)
			}
		})
	}
}

func TestEventsOfAGroup(t *testing.T) {
	c := newClanOf(t, machine.Config{Devices: 2}, newest)
	p := c.Alloc(0, 64)
	c.On(0, func() cudadrv.Result {
		c.good(c.api.GroupStart())
		for range 2 {
			cfg := ncclapi.NewCollConfig(newest)
			cfg.LaunchCompletionEvent = uintptr(c.untimed(0))
			c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 1, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[0], Stream: c.streams[0], Config: cfg}))
		}
		require.Equal(t, ncclapi.InvalidUsage, c.api.GroupEnd())
		return 0
	})
	require.Contains(t, c.api.GetLastError(0), "several launch-completion events for rank 0")
}

func TestSetEncryption(t *testing.T) {
	const key = "0123456789abcdef0123456789abcdef"
	for want, x := range map[string]struct {
		network string
		change  func(*ncclapi.EncryptionConfig)
		r       ncclapi.Result
	}{
		"":                   {"", func(*ncclapi.EncryptionConfig) {}, ncclapi.Success},
		"less than 32 bytes": {"", func(x *ncclapi.EncryptionConfig) { x.PSK = text(key[1:]) }, ncclapi.InvalidArgument},
		"not initialised":    {"", func(x *ncclapi.EncryptionConfig) { x.Magic = 0 }, ncclapi.InvalidArgument},
		"mode 2":             {"", func(x *ncclapi.EncryptionConfig) { x.Mode = 2 }, ncclapi.InvalidArgument},
		"do not encrypt":     {"127.0.0.1", func(*ncclapi.EncryptionConfig) {}, ncclapi.InvalidUsage},
	} {
		r := newRigWith(t, machine.Config{Devices: 1}, Config{Version: newest, Network: x.network})
		cfg := ncclapi.NewEncryptionConfig(newest, key)
		x.change(cfg)
		require.Equal(t, x.r, r.lib.SetEncryption(cfg), want)
		require.Contains(t, r.lib.GetLastError(0), want)
	}
	require.Equal(t, ncclapi.MissingSymbol, newRig(t, machine.Config{Devices: 1}).lib.SetEncryption(nil))
}

func TestAddressesInWindows(t *testing.T) {
	c := newClanOf(t, machine.Config{Devices: 2}, newest)
	p := []cudadrv.DevicePtr{c.public(0, 64), c.public(1, 64)}
	var w [2]ncclapi.Window
	c.group(func() {
		for rank := range w {
			c.good(c.api.CommWindowRegister(c.comms[rank], p[rank], 64, &w[rank], ncclapi.WindowCollSymmetric|ncclapi.WindowGINOnly))
		}
	})
	for rank := range 2 {
		for peer := range int32(2) {
			got, r := c.api.GetPeerDevicePointer(w[rank], 8, peer)
			c.good(r)
			require.Equal(t, p[peer]+8, got)
		}
	}
	for want, f := range map[string]func() (cudadrv.DevicePtr, ncclapi.Result){
		"byte 64: the window has 64": func() (cudadrv.DevicePtr, ncclapi.Result) { return c.api.GetPeerDevicePointer(w[0], 64, 0) },
		"rank 2 is not one of 2":     func() (cudadrv.DevicePtr, ncclapi.Result) { return c.api.GetPeerDevicePointer(w[0], 0, 2) },
		"is not a window":            func() (cudadrv.DevicePtr, ncclapi.Result) { return c.api.GetPeerDevicePointer(4711, 0, 0) },
	} {
		_, r := f()
		require.Equal(t, ncclapi.InvalidArgument, r, want)
		require.Contains(t, c.api.GetLastError(0), want)
	}
	c.good(c.api.CommWindowDeregister(c.comms[1], w[1]))
	_, r := c.api.GetPeerDevicePointer(w[0], 0, 1)
	require.Equal(t, ncclapi.InvalidArgument, r)
	require.Contains(t, c.api.GetLastError(0), "rank 1 has closed the window")
}
