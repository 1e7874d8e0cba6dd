package rng

import (
	"fmt"

	"github.com/gochorus/chorus/device"
)

// The functions below apply to the default generators of several devices. Without
// devices they apply to all devices of the default System, as in torch. They
// process one device after another, so concurrent fills may see some generators
// before and others after the change.

// ManualSeedAll sets the seed of the devices' default generators
// (torch.cuda.manual_seed_all).
func ManualSeedAll(seed uint64, devs ...*device.Device) error {
	devs, err := all("manual seed", devs)
	if err != nil {
		return err
	}
	for _, d := range devs {
		Default(d).ManualSeed(seed)
	}
	return nil
}

// SeedAll sets one random seed for the devices' default generators and returns it
// (torch.cuda.seed_all).
func SeedAll(devs ...*device.Device) (uint64, error) {
	seed := randomSeed()
	return seed, ManualSeedAll(seed, devs...)
}

// StateAll returns the states of the devices' default generators in the order of
// the devices (torch.cuda.get_rng_state_all).
func StateAll(devs ...*device.Device) ([][StateSize]byte, error) {
	devs, err := all("state", devs)
	if err != nil {
		return nil, err
	}
	states := make([][StateSize]byte, len(devs))
	for i, d := range devs {
		states[i] = Default(d).State()
	}
	return states, nil
}

// SetStateAll sets the states of the devices' default generators, one for each
// device (torch.cuda.set_rng_state_all). If it fails, no state has changed.
func SetStateAll(states [][StateSize]byte, devs ...*device.Device) error {
	devs, err := all("set state", devs)
	if err != nil {
		return err
	}
	if len(states) != len(devs) {
		return fmt.Errorf("rng: set state of %d devices: got %d states", len(devs), len(states))
	}
	for i := range states {
		if _, _, err := decode(states[i][:]); err != nil {
			return fmt.Errorf("rng: set state of %s: %w", devs[i], err)
		}
	}
	for i, d := range devs {
		if err := Default(d).SetState(states[i][:]); err != nil {
			return err
		}
	}
	return nil
}

func all(op string, devs []*device.Device) ([]*device.Device, error) {
	if len(devs) == 0 {
		d, err := device.All()
		if err != nil {
			return nil, fmt.Errorf("rng: %s of all devices: %w", op, err)
		}
		return d, nil
	}
	for i, d := range devs {
		if d == nil {
			return nil, fmt.Errorf("rng: %s: device %d of %d is nil", op, i, len(devs))
		}
	}
	return devs, nil
}
