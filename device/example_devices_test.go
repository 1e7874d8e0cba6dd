package device_test

import (
	"errors"
	"fmt"
	"log"

	"github.com/gochorus/chorus/device"
)

func ExampleNewSystem() {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 3})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(sys.Devices())
	_, err = sys.Open(3)
	fmt.Println(err)
	// Output:
	// [virtual:0 virtual:1 virtual:2]
	// device: open device 3: there are 3 (0 to 2): CUDA_ERROR_INVALID_DEVICE
}

func ExampleDevice_MemoryInfo() {
	_, devs := two()
	free, total, err := devs[0].MemoryInfo()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(free <= total, total>>30, "GiB")
	// Output: true 8 GiB
}

func ExampleDevice_CanAccessPeer() {
	_, devs := two()
	direct, err := devs[0].CanAccessPeer(devs[1])
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("copies between the devices are direct:", direct)
	// Output: copies between the devices are direct: true
}

// A missing feature of the hardware or of a library matches errors.ErrUnsupported.
func ExampleUnsupportedError() {
	_, devs := two()
	err := devs[0].Require(device.Feature{Name: "FP4", Major: 10})
	fmt.Println(errors.Is(err, errors.ErrUnsupported))
	// Output: true
}
