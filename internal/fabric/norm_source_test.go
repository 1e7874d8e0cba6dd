package fabric_test

import (
	"bytes"
	_ "embed"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/ptxtest"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// TestNormSourceOnTheHost compiles the CUDA source of norms for the host, and compares its bits
// with the results of virtual devices.
func TestNormSourceOnTheHost(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed ", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	switch rng.IntN(3) { // each takes seconds to compile
	case 0:
		normsOnHost(t, "Half", half, rng)
	case 1:
		normsOnHost(t, "BFloat", bfloat, rng)
	default:
		normsOnHost(t, "float", single, rng)
	}
}

func normsOnHost[T memory.Element](t *testing.T, name string, f float[T], rng *rand.Rand) {
	ranks := 2 + rng.IntN(2)
	program := ptxtest.Host(t, fabric.NormSourceOnHost(t), "-pthread", "-w", "-DCHORUS_TYPE="+name, "-DCHORUS_OP=Sum", fmt.Sprint("-DCHORUS_RANKS=", ranks))
	group := open(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: ranks}), &fabric.Config{Bytes: 1 << 20})
	var in, want bytes.Buffer
	for i := range 8 {
		// A lane has one word, several or none, and a team may have several rows.
		team, small := 1<<(i/2), rng.IntN(2)
		c := normCase{rows: 1 + rng.IntN(5), cols: 4 * (1 + rng.IntN(150)), algorithm: fabric.OneShot, eps: 1e-5, scale: []float32{0, 0.1}[small]}
		threads, teams := 32, 1+rng.IntN(2)
		if team <= 2 {
			threads *= 1 + rng.IntN(2)
		} else {
			teams = 1 // a GPU thread is a thread of the host
		}
		if team == 1 { // more words than one warp has sums of warps, or than there are slots
			c.rows, c.cols = 1+rng.IntN(2), 4*(1030+rng.IntN(1500))
		}
		if i%2 == 1 {
			c.algorithm = fabric.TwoShotPackets
		}
		all := runNorm(t, group, f, c, rng.Uint64())
		var x T
		words := c.cols * int(unsafe.Sizeof(x)) / 8
		put(t, &in, []uint32{uint32(c.algorithm), uint32(ranks), uint32(c.rows), uint32(words), uint32(team * min(c.rows, teams)), uint32(threads), uint32(team), uint32(small)}, []float32{c.eps, c.scale}, all[0].hostWeight)
		for _, x := range all {
			n := len(x.hostIn)
			put(t, &in, x.hostIn, x.hostAdd[margin:margin+n])
			put(t, &want, x.gotSum[margin:margin+n])
			if c.scale == 0 {
				put(t, &want, x.got[margin:margin+n])
				continue
			}
			put(t, &want, x.gotSmall[margin:margin+n])
			want.Write(bytes.Repeat([]byte{0x55}, n*(int(unsafe.Sizeof(x.hostIn[0]))-1))) // the rest of the buffer
		}
	}
	cmd := exec.CommandContext(testgpu.Context(t), program)
	cmd.Stdin = &in
	out, err := cmd.Output()
	require.NoError(t, err)
	require.True(t, bytes.Equal(want.Bytes(), out), "%d ranks, %s: the bits of the source differ from the Go functions", ranks, name)
}

func put(t *testing.T, to *bytes.Buffer, values ...any) {
	for _, v := range values {
		require.NoError(t, binary.Write(to, binary.LittleEndian, v))
	}
}
