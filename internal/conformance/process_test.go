package conformance

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/nccl"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
)

// The environment of a process that is one rank.
const (
	envRank = "CHORUS_TEST_RANK"
	envSize = "CHORUS_TEST_SIZE"
	envID   = "CHORUS_TEST_ID"
	envSeed = "CHORUS_TEST_SEED" // of inputs
)

// TestProcesses runs every operation in all types, reductions and sizes, in one set of
// processes for each number of ranks.
func TestProcesses(t *testing.T) {
	sizes := []int{2, 4}
	if testgpu.Rounds(0, 1) == 1 { // with -thorough
		sizes = append(sizes, 8)
	}
	for _, size := range sizes {
		t.Run(fmt.Sprintf("ranks=%d", size), func(t *testing.T) {
			m, err := machine.New(&machine.Config{Devices: 1})
			require.NoError(t, err)
			id, r := nccl.New(m, nccl.Config{}).GetUniqueID()
			require.Equal(t, ncclapi.Success, r)
			seed := fmt.Sprintf("%#x", rand.Uint64())
			out, errs := virtualtest.Processes(t, size, func(rank int) []string {
				return []string{envRank + "=" + strconv.Itoa(rank), envSize + "=" + strconv.Itoa(size), envID + "=" + hex.EncodeToString(id[:]), envSeed + "=" + seed}
			})
			t.Logf("seed %s, time at each rank: %v", seed, out)
			for rank, err := range errs {
				require.NoError(t, err, "rank %d", rank)
			}
		})
	}
}

// runRank is one rank of TestProcesses.
func runRank() {
	rank, _ := strconv.Atoi(os.Getenv(envRank))
	size, _ := strconv.Atoi(os.Getenv(envSize))
	m, err := machine.New(&machine.Config{Devices: size})
	if err != nil {
		panic(err)
	}
	api, dev := nccl.New(m, nccl.Config{}), cudadrv.Device(rank)
	var comm ncclapi.Comm
	c := virtualtest.NewChild(m.Driver(), dev, func() string {
		return fmt.Sprintf("rank %d: %s: %s (seed %#x)", rank, api.GetLastError(comm), m.Explain(dev), m.Seed())
	})
	var id ncclapi.UniqueID
	if _, err := hex.Decode(id[:], []byte(os.Getenv(envID))); err != nil {
		panic(err)
	}
	c.CU(c.Do(func() cudadrv.Result {
		r := api.CommInitRankScalable(&comm, int32(size), int32(rank), []ncclapi.UniqueID{id}, nil)
		c.Must(r, r == 0, 0)
		return 0
	}))
	test(c, &farRank{Driver: c.Drv, API: api, Context: c.Context, Stream: c.Stream, Comm: comm, Me: rank, N: size})
	r := api.CommDestroy(comm)
	c.Must(r, r == 0, 0)
	c.Must(errors.New("reports"), len(m.Reports()) == 0, 0)
}

// test runs the suite and prints the time that it took.
func test(c *virtualtest.Child, r *farRank) {
	r.Counts, r.Medium, r.Large, r.Huge = []int{0, 1, 1001}, 72<<10, 1<<20, 64<<20
	if testhost.On {
		r.Medium, r.Large, r.Huge = 0, 72<<10, 1<<20
	}
	var err error
	if r.Seed, err = strconv.ParseUint(os.Getenv(envSeed), 0, 64); err != nil {
		panic(err)
	}
	start := time.Now()
	err = r.testAll()
	c.Must(err, err == nil, 0)
	fmt.Print(time.Since(start).Round(time.Millisecond))
}
