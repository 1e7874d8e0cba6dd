package gpu

import (
	"net"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
)

func TestOpen(t *testing.T) {
	_, err := OpenBackend(&BackendConfig{Backend: "opencl"})
	require.ErrorContains(t, err, `unknown backend "opencl": want auto, cuda or virtual`)
	s, err := OpenBackend(&BackendConfig{Backend: Virtual, Devices: 3, Seed: 9})
	require.NoError(t, err)
	require.EqualValues(t, 9, s.Machine.Seed())
	n, r := s.Driver.DeviceGetCount()
	require.Zero(t, r)
	require.EqualValues(t, 3, n)
}

// The library never falls back by itself.
func TestAutoIsCUDAOrAnError(t *testing.T) {
	t.Setenv(env.Backend.Name, Auto)
	s, err := OpenBackend(nil)
	if err != nil {
		require.ErrorContains(t, err, "CUDA is not available on this machine")
		require.ErrorContains(t, err, "CHORUS_BACKEND=virtual selects virtual devices")
		return
	}
	require.Equal(t, CUDA, s.Name)
	require.Nil(t, s.Machine)
}

func TestChoose(t *testing.T) {
	t.Setenv(env.Backend.Name, Virtual)
	t.Setenv(env.VirtualDevices.Name, "5")
	c, err := ChooseBackend()
	require.NoError(t, err)
	require.Equal(t, &BackendChoice{Backend: Virtual, Devices: 5}, c)
	require.Empty(t, c.Note("5 virtual devices"))

	t.Setenv(env.Backend.Name, Auto)
	t.Setenv("CUDA_VISIBLE_DEVICES", "") // hides every GPU
	c, err = ChooseBackend()
	require.NoError(t, err)
	require.Equal(t, Virtual, c.Backend)
	require.Contains(t, c.Note("5 virtual devices"), "running on 5 virtual devices")
	require.NotContains(t, c.Note("virtual devices"), "\n")

	t.Setenv(env.Backend.Name, CUDA)
	_, err = ChooseBackend()
	require.ErrorAs(t, err, new(*NoGPUError))
	require.ErrorContains(t, err, "CHORUS_BACKEND=cuda requires one")

	require.NoError(t, os.Unsetenv("CUDA_VISIBLE_DEVICES"))
	if n := len(deviceFiles()); n > 0 {
		c, err = ChooseBackend()
		require.NoError(t, err)
		require.Equal(t, &BackendChoice{Backend: CUDA, Devices: n}, c)
	}
	t.Setenv(env.Backend.Name, "gpu")
	_, err = ChooseBackend()
	require.ErrorAs(t, err, new(*env.ValueError))
}

// Virtual ranks of several hosts meet over TCP, at the address that the
// coordinator is reached from.
func TestNetwork(t *testing.T) {
	listens := func() string {
		ip, err := network()
		require.NoError(t, err)
		return ip
	}
	require.Empty(t, listens())
	t.Setenv(env.Nodes.Name, "1")
	require.Empty(t, listens())
	t.Setenv(env.Nodes.Name, "2")
	t.Setenv(env.Addr.Name, "127.0.0.1:29477")
	require.Equal(t, "127.0.0.1", listens())
	t.Setenv(env.VirtualNetwork.Name, "127.0.0.2")
	require.Equal(t, "127.0.0.2", listens())
	t.Setenv(env.VirtualNetwork.Name, "foo")
	_, err := network()
	require.ErrorContains(t, err, env.VirtualNetwork.Name)
}

// On the coordinator's own host its name may mean the loopback, which ranks on other hosts cannot reach. Processes that
// another launcher than chorus run starts on several hosts do not know the coordinator's address.
func TestAddressForOtherHosts(t *testing.T) {
	interfaces := func() (list []net.Addr, err error) {
		for _, ip := range []string{"127.0.0.1", "fe80::1", "fd00::7", "10.1.2.3"} {
			list = append(list, &net.IPNet{IP: net.ParseIP(ip), Mask: net.CIDRMask(8, 32)})
		}
		return list, nil
	}
	none := func() ([]net.Addr, error) { return nil, nil }
	require.Equal(t, "127.0.0.1", rankAddress("127.0.0.1:29477", interfaces), "all processes are on this machine")
	require.Equal(t, "10.1.2.3", rankAddress("127.0.1.1:29477", interfaces))
	require.Equal(t, "10.1.2.3", rankAddress("localhost:29477", interfaces))
	require.Equal(t, "10.1.2.3", rankAddress("", interfaces))
	require.Empty(t, rankAddress("", none))
	require.False(t, severalHosts())
	t.Setenv("SLURM_NNODES", "2")
	require.True(t, severalHosts())
	t.Setenv("SLURM_STEP_NUM_NODES", "1")
	require.False(t, severalHosts())
	t.Setenv(env.Nodes.Name, "2")
	require.True(t, severalHosts())
}

// Virtual devices of two hosts differ, and those of one are the same in every
// process.
func TestUUIDsBelongToTheHost(t *testing.T) {
	uuid := func(host string) any {
		t.Setenv(env.HostName.Name, host)
		s, err := OpenBackend(&BackendConfig{Backend: Virtual, Devices: 1})
		require.NoError(t, err)
		d, r := s.Driver.DeviceGet(0)
		require.Zero(t, r)
		u, r := s.Driver.DeviceGetUUID(d)
		require.Zero(t, r)
		return u
	}
	require.Equal(t, uuid("a"), uuid("a"))
	require.NotEqual(t, uuid("a"), uuid("b"))
}

// Virtual devices report mistakes with file and line in tests, unless the environment says otherwise.
func TestSanitizerInTests(t *testing.T) {
	for value, want := range map[string]bool{"": true, "0": false, "1": true} {
		if t.Setenv(env.Sanitizer.Name, value); value == "" {
			require.NoError(t, os.Unsetenv(env.Sanitizer.Name))
		}
		s, err := OpenBackend(&BackendConfig{Backend: Virtual, Devices: 1})
		require.NoError(t, err)
		require.Equal(t, want, s.Sanitizer != nil, "%q", value)
	}
}

// FuzzParseVisible reads lists of visible devices.
func FuzzParseVisible(f *testing.F) {
	f.Add("0,2,1")
	f.Add("GPU-1234,GPU-5678")
	f.Add("MIG-,-1,99999999999999999999")
	f.Fuzz(func(t *testing.T, s string) { parseVisible(s) })
}
