package gpu

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/nvml"
)

// The vectors of torch's test_env_var_parsing and of the driver's documentation.
func TestParseVisible(t *testing.T) {
	for list, want := range map[string]visible{
		"":                          {},
		"0":                         {ordinals: []int{0}},
		"1,0,2":                     {ordinals: []int{1, 0, 2}},
		" 0 , 1 ":                   {ordinals: []int{0, 1}},
		"0,":                        {ordinals: []int{0}},
		"-1":                        {},
		"none":                      {},
		"-":                         {},
		"+-1":                       {},
		"99999999999999999999":      {},
		"1gpu2,2ampere":             {ordinals: []int{1, 2}},
		"0, 1, 2, -1, 3":            {ordinals: []int{0, 1, 2}},
		"2, +3, -0, 5":              {ordinals: []int{2, 3, 0, 5}},
		"one,two,3,4":               {},
		"4,3,two,one":               {ordinals: []int{4, 3}},
		"0,0":                       {},
		"1,2,1":                     {},
		"0,-1,0":                    {ordinals: []int{0}},
		"GPU-123, 2":                {uuids: []string{"GPU-123"}},
		"GPU-123,GPU-45":            {uuids: []string{"GPU-123", "GPU-45"}},
		"GPU-123,GPU-123":           {},
		"GPU-123,MIG-45":            {uuids: []string{"GPU-123"}},
		"MIG-12,MIG-34,GPU-1":       {uuids: []string{"MIG-12", "MIG-34"}},
		"MIG-89c850dc,MIG-89c850dc": {},
	} {
		require.Equal(t, want, parseVisible(list), "%q", list)
	}
}

// The vectors of torch's test_partial_uuid_resolver.
func TestResolve(t *testing.T) {
	uuids := []string{
		"GPU-9942190a-aa31-4ff1-4aa9-c388d80f85f1", "GPU-9e8d35e3-a134-0fdd-0e01-23811fdbd293",
		"GPU-e429a63e-c61c-4795-b757-5132caeb8e70", "GPU-eee1dfbc-0a0f-6ad8-5ff6-dc942a8b9d98",
		"GPU-bbcd6503-5150-4e92-c266-97cc4390d04e", "GPU-472ea263-58d7-410d-cc82-f7fdece5bd28",
		"GPU-e56257c4-947f-6a5b-7ec9-0f45567ccf4e", "GPU-1c20e77d-1c1a-d9ed-fe37-18b8466a78ad",
	}
	for _, c := range []struct {
		entries []string
		want    []int
	}{
		{[]string{"GPU-9942190a"}, []int{0}},
		{[]string{"GPU-e4", "GPU-9e8d35e3"}, []int{2, 1}},
		{uuids, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{[]string{"GPU-e4", "GPU-nothing", "GPU-9e8d35e3"}, []int{2}},
		{[]string{"GPU-e"}, nil}, // three begin so
		{[]string{"GPU-47", "GPU-9", "GPU-e4"}, []int{5}},
		{[]string{"GPU-47", "GPU-472"}, nil}, // twice the same
		{[]string{"GPU-9e8d35e3", "GPU-47", "GPU-9e8d"}, nil},
		{nil, nil},
	} {
		require.Equal(t, c.want, resolve(c.entries, uuids), "%v", c.entries)
	}
}

func TestCountVisible(t *testing.T) {
	for list, want := range map[string]int{
		"": 0, "0": 1, "0,1": 2, "1,0,2": 3, "0,9,1": 1, "GPU-76eab91e,GPU-12": 2, "0,0": 0, "3,4": 1,
	} {
		t.Setenv("CUDA_VISIBLE_DEVICES", list)
		require.Equal(t, want, countVisible(4), "CUDA_VISIBLE_DEVICES=%q", list)
	}
	require.NoError(t, os.Unsetenv("CUDA_VISIBLE_DEVICES"))
	require.Equal(t, 4, countVisible(4))
}

// gpus is an NVML with these UUIDs.
type gpus struct {
	uuids []string
	mig   bool
	err   error
}

func (g gpus) UUIDs() ([]string, error)           { return g.uuids, g.err }
func (g gpus) MIG() (bool, error)                 { return g.mig, nil }
func (g gpus) Device(string) (nvml.Device, error) { return nil, nil }

func TestCountNVML(t *testing.T) {
	three := gpus{uuids: []string{"GPU-ab", "GPU-ac", "GPU-b"}}
	for list, want := range map[string]int{"": 0, "2,0": 2, "0,3,1": 1, "GPU-ac,GPU-b": 2, "GPU-a": 0} {
		t.Setenv("CUDA_VISIBLE_DEVICES", list)
		n, ok := countNVML(three)
		require.True(t, ok)
		require.Equal(t, want, n, "CUDA_VISIBLE_DEVICES=%q", list)
	}
	t.Setenv("CUDA_VISIBLE_DEVICES", "MIG-12")
	_, ok := countNVML(three)
	require.False(t, ok, "NVML does not count instances")
	require.NoError(t, os.Unsetenv("CUDA_VISIBLE_DEVICES"))
	n, ok := countNVML(three)
	require.True(t, ok)
	require.Equal(t, 3, n)
	_, ok = countNVML(gpus{uuids: three.uuids, mig: true})
	require.False(t, ok)
	_, ok = countNVML(gpus{err: errors.New("lost")})
	require.False(t, ok)
}

// CountDevices is not cached, and virtual devices do not obey CUDA_VISIBLE_DEVICES.
func TestCount(t *testing.T) {
	t.Setenv(env.Backend.Name, Virtual)
	t.Setenv(env.VisibleDevices.Name, "0")
	for _, c := range []struct {
		set  string
		want int
	}{{"3", 3}, {"5", 5}} {
		t.Setenv(env.VirtualDevices.Name, c.set)
		n, err := CountDevices()
		require.NoError(t, err)
		require.Equal(t, c.want, n)
	}
	t.Setenv(env.Backend.Name, "gpu")
	_, err := CountDevices()
	require.ErrorAs(t, err, new(*env.ValueError))
}
