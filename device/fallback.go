package device

import "github.com/gochorus/chorus/internal/backend"

// OrVirtual is Default for programs that are also useful without a GPU, such as the
// examples: if CHORUS_BACKEND permits it and no GPU is visible, it opens virtual devices.
// note is then a line for the user that says so, and empty otherwise.
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
