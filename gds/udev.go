package gds

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/cufileapi"
)

// udevFolder is where udev keeps what it knows of devices.
var udevFolder = "/run/udev/data"

// unregistered is the error of a file that cuFile did not register. cuFile asks udev
// what file system is on the file's disk, and says no more than that it did not register
// the file where there is no udev, as in most containers and small virtual machines.
func unregistered(r cufileapi.Result, fd int) error {
	err := failed("cuFileHandleRegister", r)
	var st unix.Stat_t
	if r != cufileapi.HandleNotRegistered || unix.Fstat(fd, &st) != nil {
		return err
	}
	if why := unknownDisk(st.Dev); why != "" {
		return fmt.Errorf("%w; %s", err, why)
	}
	return err
}

// unknownDisk says why udev does not know the disk with that number, or "".
func unknownDisk(number uint64) string {
	major, minor := unix.Major(number), unix.Minor(number)
	if major == 0 {
		return "the file is on no disk that udev could know, and this cuFile takes no others"
	}
	entry := fmt.Sprintf("%s/b%d:%d", udevFolder, major, minor)
	if _, err := os.Stat(entry); err == nil {
		return ""
	}
	return fmt.Sprintf("cuFile asks udev for the disk, and there is no %s: in a container, mount the host's /run/udev", entry)
}
