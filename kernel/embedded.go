package kernel

import (
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/internal/ptx"
)

// ArchList returns the architectures of the Chorus kernels, as torch.cuda.get_arch_list
// does for torch's. They are PTX, which the driver compiles for every GPU with that
// compute capability or a later one.
func ArchList() []string { return []string{fmt.Sprintf("compute_%d", ptx.Arch)} }

// GencodeFlags returns ArchList as flags of nvcc, as
// torch.cuda.get_gencode_flags does.
func GencodeFlags() string {
	return fmt.Sprintf("-gencode compute=compute_%[1]d,code=compute_%[1]d", ptx.Arch)
}

// embedded returns the source's PTX. While the archive is empty it returns none and no
// error; NVRTC then compiles the source.
func embedded(dev *device.Device, src *Source) ([]byte, error) {
	archive := kern.Archive(src)
	if n, err := archive.Len(); err != nil || n == 0 {
		return nil, err
	}
	e, err := archive.Find(ptx.Digest(src.CUDA, src.Options))
	if err != nil {
		return nil, err
	}
	if e == nil {
		return nil, fmt.Errorf("kernel: load %s: there is no PTX for this source with the options %q: run make ptx", src.Name, src.Options)
	}
	if err := dev.Require(device.Feature{Name: "kernel: load " + src.Name, Major: e.Arch / 10, Minor: e.Arch % 10}); err != nil {
		return nil, err
	}
	return e.Text, nil
}
