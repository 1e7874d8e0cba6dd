package nccl_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// Each version of NCCL has the functions and options of the versions before. What it lacks is an
// error that names the version, and has no effect.
func TestVersions(t *testing.T) {
	versions := []string{"2.28.3", "2.28.7", "2.29.2", "2.29.7", "2.30.3", "2.30.4", "2.30.7", "2.31.2", newest}
	for at, version := range versions {
		t.Run(version, func(t *testing.T) {
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: version})
			ranks := connect(t, devs)
			e, err := stream.NewEvent(devs[0], nil)
			require.NoError(t, err)
			defer e.Close()
			config := func(cfg nccl.Config) error {
				id, err := nccl.NewUniqueID(devs[0])
				require.NoError(t, err)
				c, err := nccl.NewCommunicator(testgpu.Context(t), devs[0], id, 0, 1, &cfg)
				if err != nil {
					return err
				}
				return c.Close()
			}
			_, windows := windowsOf(t, ranks)
			second := func(_ any, err error) error { return err }
			for _, x := range []struct { // in the order of the calls
				since string
				err   error
			}{
				{"2.28.3", config(nccl.Config{NChannelsPerNetPeer: new(1), NVLinkCentricSched: new(true)})},
				{"2.29.2", second(ranks[0].c.Properties())},
				{"2.29.2", second(windows[0].Ptr())},
				{"2.29.2", second(windows[0].PeerPtr(1))},
				{"2.29.2", config(nccl.Config{GraphUsageMode: new(1), NumRMACtx: new(1)})},
				{"2.29.7", second(ranks[0].c.MemoryStats())},
				{"2.30.3", config(nccl.Config{MaxP2PPeers: new(1)})},
				{"2.30.4", second(nccl.Parameters(devs[0]))},
				{"2.30.7", config(nccl.Config{GraphStreamOrdering: new(1)})},
				{"2.31.2", config(nccl.Config{LaunchOrderImplicit: new(true), NumRMASignals: new(2), RMAEagerInit: new(true), HostCFTMode: new(2)})},
				{"2.31.2", second(nccl.With(ranks[0].c, &nccl.CallConfig{MaxCTAs: new(2)}))},
				{newest, config(nccl.Config{NVLSHostMode: new(1)})},
				{newest, launchEvent(ranks[0].c, e)},
				{"2.27.3", errors.Join(windows[0].Close(), windows[1].Close())},
				{"2.28.7", ranks[1].c.Revoke()},
			} {
				if has(versions, at, x.since) {
					require.NoError(t, x.err, x.since)
					continue
				}
				var u *device.UnsupportedError
				require.ErrorAs(t, x.err, &u, x.since)
				require.Equal(t, []string{"NCCL " + x.since, "NCCL " + version}, []string{u.Need, u.Have})
			}
		})
	}
}

// launchEvent gives a collective an event. Before NCCL 2.31.2 the configuration is missing first.
func launchEvent(c *nccl.Communicator, e *stream.Event) error {
	if _, err := nccl.With(c, &nccl.CallConfig{}); err != nil {
		return &device.UnsupportedError{Need: "NCCL " + newest, Have: err.(*device.UnsupportedError).Have}
	}
	_, err := nccl.With(c, &nccl.CallConfig{LaunchEvent: e})
	return err
}

// has reports whether the version at an index has what came with another one.
func has(versions []string, at int, since string) bool {
	return slices.Contains(versions[:at+1], since) || !slices.Contains(versions, since)
}
