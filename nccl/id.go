package nccl

import (
	"errors"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// A UniqueID identifies a communicator that is about to be made (ncclUniqueId). The rank
// that made it sends its bytes to the other ranks, by any means. It contains the address
// of that process's listener and authorizes its owner to join: keep it secret. One id
// makes one communicator.
type UniqueID [128]byte

// NewUniqueID makes an id on the system of dev and starts listening for the
// ranks; the process must live until the communicator is made. It fails if NCCL has not answered within CHORUS_DRIVER_TIMEOUT.
func NewUniqueID(dev *device.Device) (UniqueID, error) {
	if dev == nil {
		return UniqueID{}, errors.New("nccl: new unique id: no device given")
	}
	api, err := gpu.DeviceOf(dev).System().NCCL()
	if err != nil {
		return UniqueID{}, err
	}
	var id ncclapi.UniqueID
	var r ncclapi.Result
	err = gpu.DeviceOf(dev).InTime(func() string { return "ncclGetUniqueId" }, func() error {
		if err := startNetworking(dev); err != nil {
			return err
		}
		return relaxed(dev, func() error {
			id, r = api.GetUniqueID()
			return nil
		})
	})
	if err != nil {
		return UniqueID{}, err
	}
	if r != ncclapi.Success {
		return UniqueID{}, explainEncryption(dev, &Error{Op: "ncclGetUniqueId", Rank: -1, Err: Result(r), Detail: api.GetLastError(0)})
	}
	return UniqueID(id), nil
}
