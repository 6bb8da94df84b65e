from plugins import STEPS


def negative(image):
    return image.point(lambda value: 255 - value)


STEPS.append(negative)
