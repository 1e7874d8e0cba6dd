package gpu

import "fmt"

// notRun explains why the host cannot wait for captured operations.
const notRun = "captured operations have not run and cannot be waited for"

// RefuseCapture returns an error if the stream is being captured. It costs almost nothing
// while the process captures nothing.
func (s *Stream) RefuseCapture(op, advice string) error {
	if !AnyCapture() {
		return nil
	}
	if yes, err := s.Capturing(); err != nil || !yes {
		return nil // the call itself gets the driver's error
	}
	return s.dev.sys.errs.Captured(op, s.String(), advice)
}

// RefuseWait returns an error if the goroutine must not wait for the stream or query it:
// because the stream is being captured, or because of a capture that the stream is not
// part of.
func (s *Stream) RefuseWait(op string) error {
	if err := s.RefuseCapture(op, notRun); err != nil {
		return err
	}
	return refuseHost(op, s.String)
}

// RefuseCaptured returns an error if the goroutine must not wait for an event of d or
// query it: because the event was captured, or because of another capture.
func (d *Device) RefuseCaptured(op string, captured bool) error {
	if captured {
		return d.sys.errs.Captured(op, "what the event recorded on "+d.String(), notRun)
	}
	return refuseHost(op, func() string { return "an event of " + d.String() })
}

// RefuseSync returns an error if a stream of the device has begun a capture.
func (d *Device) RefuseSync(op string) error {
	if c := find(func(c *Capture) bool { return c.Stream.dev == d }); c != nil {
		return d.sys.errs.Captured(op, c.Stream.String(), notRun+": synchronize the device before or after the capture")
	}
	return nil
}

// refuseHost is RefuseWait for an object that is not part of a capture.
func refuseHost(op string, name func() string) error {
	if !AnyCapture() {
		return nil
	}
	c, others := forbids()
	if c == nil {
		return nil
	}
	who, mode := "the goroutine that captures must not", "relaxed"
	if others {
		who, mode = "no goroutine may", "thread_local"
	}
	return c.Stream.dev.sys.errs.Captured(op, c.Stream.String(), fmt.Sprintf(
		"in the mode %s %s wait for %s or ask for it: do so before or after the capture, or capture in the mode %s", c.modeName(), who, name(), mode))
}
