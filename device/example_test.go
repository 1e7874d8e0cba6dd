package device_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/stream"
)

// two are virtual devices, so that the examples run anywhere; a program calls
// device.All.
func two() (*device.System, []*device.Device) {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2})
	if err != nil {
		panic(err)
	}
	return sys, sys.Devices()
}

func Example() {
	_, devs := two()
	for _, d := range devs {
		p, err := d.Properties()
		if err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%s: %s, %d.%d, %d GiB\n", d, p.Name, p.Major, p.Minor, p.TotalMemory>>30)
	}
	// Output:
	// virtual:0: Chorus Virtual Device, 9.0, 8 GiB
	// virtual:1: Chorus Virtual Device, 9.0, 8 GiB
}

func ExampleDevice_Supports() {
	_, devs := two()
	tf32, err := devs[0].Supports(device.TF32)
	fmt.Println(tf32, err)
	fmt.Println(devs[0].Require(device.Feature{Name: "FP4", Major: 10}))
	// Output:
	// true <nil>
	// FP4 needs a device of sm_100 or newer; this machine has virtual:0 of sm_90
}

func ExampleDevice_Temperature() {
	_, devs := two()
	celsius, err := devs[0].Temperature()
	if errors.Is(err, errors.ErrUnsupported) {
		fmt.Println(err)
		return
	}
	fmt.Println(celsius)
	// Output: the temperature of virtual:0 needs a GPU; this machine has virtual devices
}

func ExampleNewContext() {
	_, devs := two()
	ctx := device.NewContext(context.Background(), devs[1])
	fmt.Println(device.Current(ctx))
	// Output: virtual:1
}

func ExampleSystem_SetSyncDebug() {
	sys, devs := two()
	s, err := stream.New(devs[0], nil)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer s.Close()
	defer sys.SetSyncDebug(device.SyncError)()
	err = s.Sync(context.Background())
	fmt.Println(errors.Is(err, device.ErrSynchronizing))
	fmt.Println(err)
	// Output:
	// true
	// stream: sync on virtual:0: called a synchronizing CUDA operation, which SyncError forbids
}
