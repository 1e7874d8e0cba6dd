package kernel

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func entryOf(src *Source, text string) cudacc.Entry {
	return cudacc.Entry{Digest: cudacc.Digest(src.CUDA, src.Options), Name: "e", Arch: 75, Compiler: "hand", Version: "6.3", Text: []byte(text)}
}

func TestEmbedded(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0] // of compute capability 9.0
	src := &Source{Name: "e.cu", CUDA: "code", Options: []string{"-DX"}}
	image, err := embedded(dev, src)
	require.NoError(t, err)
	require.Nil(t, image, "no archive")
	inside.Embed(src, cudacc.OpenArchive(cudacc.PackArchive(nil)))
	image, err = embedded(dev, src)
	require.NoError(t, err)
	require.Nil(t, image, "an empty archive")

	inside.Embed(src, cudacc.OpenArchive(cudacc.PackArchive([]cudacc.Entry{entryOf(src, "text")})))
	image, err = embedded(dev, src)
	require.NoError(t, err)
	require.Equal(t, "text", string(image))
	other := *src
	other.Options = nil
	_, err = embedded(dev, &other)
	require.ErrorContains(t, err, "kernel: load e.cu: there is no PTX for this source with the options []: run make ptx")
	newer := entryOf(src, "text")
	newer.Arch = 100
	inside.Embed(src, cudacc.OpenArchive(cudacc.PackArchive([]cudacc.Entry{newer})))
	_, err = embedded(dev, src)
	var u *device.UnsupportedError
	require.ErrorAs(t, err, &u)
	require.ErrorContains(t, err, "sm_100")
	inside.Embed(src, cudacc.OpenArchive([]byte("broken")))
	_, err = embedded(dev, src)
	require.ErrorContains(t, err, "ptx: read archive")
}

// The driver compiles embedded PTX; the source is not looked at.
func TestEmbeddedRuns(t *testing.T) {
	src := &Source{Name: "e.cu", CUDA: "this does not compile", Kernels: []Def{{Name: "store", Params: []Param{Pointer, U32},
		Go: func(c *Call) { Update[uint32](c, 0, 1)[0] = Get[uint32](c, 1) }}}}
	inside.Embed(src, cudacc.OpenArchive(cudacc.PackArchive([]cudacc.Entry{entryOf(src, `.version 6.3
.target sm_75
.address_size 64
.visible .entry store(.param .u64 p, .param .u32 v) {
	.reg .b64 %rd<3>;
	.reg .b32 %r<2>;
	ld.param.u64 %rd1, [p];
	ld.param.u32 %r1, [v];
	cvta.to.global.u64 %rd2, %rd1;
	st.global.u32 [%rd2], %r1;
	ret;
}
`)})))
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		m, err := Compile(devs[0], src)
		require.NoError(t, err)
		defer m.Close()
		k, err := m.Kernel("store")
		require.NoError(t, err)
		x, err := memory.MakeFrom(s, []uint32{1, 2})
		require.NoError(t, err)
		defer x.Close()
		require.NoError(t, k.Launch(s, Cover(1), Ptr(x), Scalar[uint32](77)))
		got := make([]uint32, 2)
		require.NoError(t, x.CopyTo(s, got))
		require.Equal(t, []uint32{77, 2}, got)
	})
}

func TestArchList(t *testing.T) {
	require.Equal(t, []string{"compute_75"}, ArchList())
	require.Equal(t, "-gencode compute=compute_75,code=compute_75", GencodeFlags())
}
