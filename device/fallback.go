package device

import "github.com/gochorus/chorus/internal/backend"

// OrVirtual is Default for programs that are useful without a GPU too, such as
// the examples: where CHORUS_BACKEND leaves the choice and no GPU is visible, it
// opens virtual devices. note is then one line for the user that says so, and
// empty otherwise.
func OrVirtual() (s *System, note string, err error) {
	c, err := backend.Choose()
	if err != nil {
		return nil, "", err
	}
	if c.NoGPU == "" {
		s, err = Default()
		return s, "", err
	}
	s, err = NewSystem(&SystemConfig{Backend: c.Backend, VirtualDevices: c.Devices})
	return s, c.Note("virtual devices"), err
}
