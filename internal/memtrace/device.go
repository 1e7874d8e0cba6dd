package memtrace

import (
	"errors"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Device is the Allocator of a device, with one stream for each stream of a trace.
type Device struct {
	dev     *device.Device
	streams []*stream.Stream // the first is the default stream
}

// OnDevice returns the allocator of dev for traces with the given number of streams.
func OnDevice(dev *device.Device, streams int) (*Device, error) {
	d := &Device{dev: dev, streams: []*stream.Stream{stream.Default(dev)}}
	for len(d.streams) < streams {
		s, err := stream.New(dev, nil)
		if err != nil {
			return nil, errors.Join(err, d.Close())
		}
		d.streams = append(d.streams, s)
	}
	return d, nil
}

// Close closes the streams.
func (d *Device) Close() error {
	var errs []error
	for _, s := range d.streams[1:] {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

func (d *Device) Alloc(stream, bytes int) (uint64, error) {
	return memory.AllocRaw(d.streams[stream], bytes)
}

func (d *Device) Free(ptr uint64) error { return memory.FreeRaw(d.dev, ptr) }

func (d *Device) EmptyCache() error { return memory.EmptyCache(d.dev) }

func (d *Device) ResetPeaks() error { return memory.ResetPeakStats(d.dev) }

func (d *Device) Stats() (memory.Stats, error) { return memory.StatsOf(d.dev) }
