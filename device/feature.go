package device

import "fmt"

// A Feature is a hardware feature that devices have from a compute capability on. A
// program may define more features.
type Feature struct {
	Name         string
	Major, Minor int // the first compute capability that has it
}

// The features that programs check to choose number types.
var (
	TensorCores = Feature{"tensor cores", 7, 0}
	BFloat16    = Feature{"bfloat16 arithmetic", 8, 0}  // torch.cuda.is_bf16_supported, without emulation
	TF32        = Feature{"TF32 matrix products", 8, 0} // torch.cuda.is_tf32_supported
	Float8      = Feature{"8-bit float matrix products", 8, 9}
)

// Supports reports whether the device has a feature. No context is created.
func (d *Device) Supports(f Feature) (bool, error) {
	major, minor, err := d.Capability()
	if err != nil {
		return false, err
	}
	return major > f.Major || major == f.Major && minor >= f.Minor, nil
}

// Require returns an *UnsupportedError if the device lacks a feature.
func (d *Device) Require(f Feature) error {
	ok, err := d.Supports(f)
	if err != nil || ok {
		return err
	}
	arch, err := d.Arch()
	if err != nil {
		return err
	}
	return &UnsupportedError{Feature: f.Name, Need: fmt.Sprintf("a device of sm_%d%d or newer", f.Major, f.Minor),
		Have: fmt.Sprintf("%s of %s", d, arch)}
}

// Arch returns the architecture that code for the device is compiled for, such as "sm_90":
// an entry of torch.cuda.get_arch_list.
func (d *Device) Arch() (string, error) {
	major, minor, err := d.Capability()
	return fmt.Sprintf("sm_%d%d", major, minor), err
}
